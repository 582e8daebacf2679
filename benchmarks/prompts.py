"""Prompts of an exact token length: pseudo-random ids, the same for the same seed on every machine and Python.

Ids, not text: the tokeniser of the model under test cannot change the length, and no two prompts share a prefix by
accident, so a prefix cache gains exactly what a trace's `hash_ids` say it should.
"""

from __future__ import annotations

from array import array
from random import Random

LOWEST_TOKEN_ID = 1_000
"""Below it vocabularies keep special tokens and single bytes."""
HASH_BLOCK_TOKENS = 512
"""Tokens that one `hash_ids` entry of a trace stands for."""


class PromptMaker:
    """Makes the prompts of one run. Token runs of hashed blocks are kept, so that using one again costs a look-up."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seed = seed
        self._ids = range(LOWEST_TOKEN_ID, vocab_size)
        self._blocks: dict[int, array[int]] = {}

    def prompt(self, index: int, tokens: int, hash_ids: tuple[int, ...] = ()) -> array[int]:
        """`tokens` ids: first the run of each hashed block, then ids of this request (`index`) alone."""
        ids = array("I")
        for hash_id in hash_ids:
            ids.extend(self._block(hash_id))
        del ids[tokens:]
        ids.extend(self._drawn(f"request {index}", tokens - len(ids)))
        return ids

    def _block(self, hash_id: int) -> array[int]:
        if hash_id not in self._blocks:
            self._blocks[hash_id] = self._drawn(f"block {hash_id}", HASH_BLOCK_TOKENS)
        return self._blocks[hash_id]

    def _drawn(self, name: str, tokens: int) -> array[int]:
        return array("I", Random(f"{self._seed} {name}").choices(self._ids, k=tokens))
