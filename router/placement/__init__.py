"""Where a request goes (pure: the standard library and `headrace` only)."""
