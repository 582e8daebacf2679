"""The second tier: evicted blocks kept in host memory, so that a long-idle conversation is read back instead of
computed again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from workers.kv.ledger import LedgerDrift
from workers.kv.moves import Move, MoveKind


class HostTier:
    """Slots 0 … slots-1 of one block each, by hash, the least recently used given up first. A slot that a pending move
    reads or writes is *busy* until `settle`: it is neither given up nor written twice.

    `worth_it` says whether reading a block back is cheaper than computing it, as measured; while it is not, nothing
    goes out and nothing is found.
    """

    def __init__(self, slots: int) -> None:
        self.worth_it = True
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        """Oldest first."""
        self._free = list(range(slots - 1, -1, -1))
        self._total = slots
        self._busy: set[bytes] = set()

    def slot_of(self, block_hash: bytes) -> int | None:
        return self._slots.get(block_hash) if self.worth_it else None

    def keep(self, block_hash: bytes, block_id: int) -> Move | None:
        """The move that saves an evicted block; None where it is here already, or has no place."""
        if not self.worth_it:
            return None
        if block_hash in self._slots:
            self._slots.move_to_end(block_hash)
            return None
        slot = self._free.pop() if self._free else self._give_up_oldest()
        if slot is None:
            return None
        self._slots[block_hash] = slot
        self._busy.add(block_hash)
        return Move(MoveKind.OUT, block_id, slot)

    def read(self, block_hash: bytes) -> int:
        """Its slot, which stays what it is until `settle`. Raises LedgerDrift for a hash that is not here."""
        if block_hash not in self._slots:
            raise LedgerDrift(f"host memory has no block {block_hash.hex()}")
        self._slots.move_to_end(block_hash)
        self._busy.add(block_hash)
        return self._slots[block_hash]

    def settle(self) -> None:
        """All moves have been carried out."""
        self._busy.clear()

    def forget(self, slots: Iterable[int]) -> None:
        """What these slots hold is not to be trusted."""
        lost = set(slots)
        for block_hash in [name for name, slot in self._slots.items() if slot in lost]:
            self._drop(block_hash)

    def discard(self, block_hashes: Iterable[bytes]) -> None:
        """Their content was wrong where it came from."""
        for block_hash in block_hashes:
            if block_hash in self._slots:
                self._drop(block_hash)

    def check(self) -> None:
        """Raises LedgerDrift unless every slot is free or named once."""
        if sorted((*self._free, *self._slots.values())) != list(range(self._total)):
            raise LedgerDrift(f"host slots: {len(self._free)} free, {len(self._slots)} named, {self._total} in all")

    def _drop(self, block_hash: bytes) -> None:
        self._free.append(self._slots.pop(block_hash))
        self._busy.discard(block_hash)

    def _give_up_oldest(self) -> int | None:
        oldest = next((name for name in self._slots if name not in self._busy), None)
        return None if oldest is None else self._slots.pop(oldest)
