"""Whether a grammar can be carried out, found out before its request is accepted.

`judge` answers from a cache or asks a `child`: a process of its own that compiles with the same library, limits and
tokenizer as workers do, and that is killed and replaced when a grammar takes too long or ends it. The event loop only
ever waits.
"""
