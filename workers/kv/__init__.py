"""KV blocks: the pool that owns them, the ledger that accounts for each change, the tables that say whose they are.

Pure (standard library only) and owned by the engine's thread; tensors live with the model runner.
"""
