"""Which calls become requests (pure: the standard library and `headrace` only)."""
