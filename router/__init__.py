"""The router: parses, admits, places and delivers. It holds no request state that the store does not have."""
