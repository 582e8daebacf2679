"""The protocols clients speak; each parses, calls the one service, and tells errors by the one table."""
