"""The KV side of a roster: which blocks its sequences hold, what they find computed, and which blocks have to move
before the next forward pass.

Blocks are shared in two ways, and never written by two: full blocks of equal tokens through the prefix index, and the
prompt's last block, which each choice of a request fills with its own output, by copying it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.prefix import root_hash
from workers.generation import Generation
from workers.kv.host import HostTier
from workers.kv.ledger import LedgerDrift, Reason
from workers.kv.moves import Move, MoveKind
from workers.kv.pool import BlockPool
from workers.kv.prefixes import Prefixes
from workers.kv.tables import BlockTables
from workers.scheduler.room import NO_HIT, Hit
from workers.scheduler.sequence import SequenceKey
from workers.scheduler.state import Limits

NO_ADAPTER = ""


@dataclass(frozen=True)
class Reuse:
    """What of computed KV may be found again."""

    retain: bool = True
    """False: sequences that are alive share, and only choices of one request; nothing outlives its holders."""
    weight_version: str = ""
    host_blocks: int = 0
    """Evicted blocks that host memory keeps."""
    move_block_s: float = 0.0
    """Seconds that one block takes there and back."""


class Holdings:
    """Owned by the engine's thread."""

    def __init__(self, limits: Limits, reuse: Reuse) -> None:
        self._reuse = reuse
        self._block_size = limits.block_size
        self.tier = HostTier(reuse.host_blocks) if reuse.host_blocks and reuse.retain else None
        pool = BlockPool(limits.total_blocks, retain=reuse.retain, evicted=None if self.tier is None else self._save)
        self.tables = BlockTables(pool, limits.block_size)
        self._prefixes = Prefixes(pool, limits.block_size, self.tier)
        self._moves: list[Move] = []
        self.known_tokens_total = 0
        """Known tokens of all that were started …"""
        self.hit_tokens_total = 0
        """… how many of these were found computed …"""
        self.host_hit_tokens_total = 0
        """… and how many of those in host memory."""

    @property
    def allocatable_blocks(self) -> int:
        return self.tables.pool.allocatable_blocks

    # -- for whoever plans a step ------------------------------------------------------------------------------------

    def hit_of(self, generation: Generation, siblings: Iterable[Generation]) -> Hit:
        """What a waiting sequence would find computed if it started now. Nothing where every row of its prompt has
        to be scored.
        """
        if generation.scores_prompt:
            return NO_HIT
        key, known = generation.sequence.key, generation.sequence.known
        most_blocks = self._most_found(generation)
        block_ids, in_host = self._prefixes.find(key, generation.tokens, most_blocks)
        found = len(block_ids) + len(in_host)
        slots = tuple(self._slot(block_hash) for block_hash in in_host)
        if found < most_blocks:
            frontier = self._prefixes.hash_at(key, found)
            pending = self._prefixes.is_computing(frontier)
            return Hit(found * self._block_size, block_ids, slots, None, frontier, pending)
        source = self._source_of_last(generation, siblings) if known - 1 > found * self._block_size else None
        return Hit(found * self._block_size if source is None else known - 1, block_ids, slots, source)

    def awaits_its_prefix(self, generation: Generation) -> bool:
        """What `hit_of` says in `pending`, at a fraction of its price."""
        most_blocks = self._most_found(generation)
        return not generation.scores_prompt and self._prefixes.awaits(generation.sequence.key, most_blocks)

    def shared_ids(self, key: SequenceKey) -> tuple[int, ...]:
        references = self.tables.pool.references
        return tuple(block_id for block_id in self.tables.block_ids(key) if references(block_id) > 1)

    # -- sequences come, run and go ----------------------------------------------------------------------------------

    def begin(self, generation: Generation) -> None:
        request = generation.bound.request
        salt = request.tenant if self._reuse.retain else request.id
        root = root_hash(NO_ADAPTER, self._reuse.weight_version, salt)
        self._prefixes.begin(generation.sequence.key, root, generation.tokens)

    def end(self, generation: Generation, reason: Reason) -> None:
        self.release(generation, reason)
        self._prefixes.end(generation.sequence.key)

    def new_step(self, compute_block_s: float) -> None:
        """The moves of the step before have been carried out. Computing a block takes so long, as measured (0.0: not
        yet): host memory is used as long as a block's way there and back takes no longer.
        """
        self._moves.clear()
        if self.tier is not None:
            self.tier.settle()
            self.tier.worth_it = compute_block_s == 0.0 or self._reuse.move_block_s <= compute_block_s

    def adopt(self, generation: Generation, hit: Hit) -> None:
        """Pins what a sequence has found, so that no allocation of this step takes it."""
        key = generation.sequence.key
        generation.sequence.borrowed_blocks = self.tables.adopt(key, hit.block_ids, Reason.ADMIT)
        if self.tier is not None:
            for place in range(len(hit.block_ids), len(hit.block_ids) + len(hit.host_slots)):
                self.tier.read(self._prefixes.hash_at(key, place))

    def start(self, generation: Generation, hit: Hit) -> None:
        """Takes the rest of an adopted sequence's blocks, and has filled what comes from elsewhere."""
        sequence = generation.sequence
        self.grow(generation, Reason.ADMIT)
        table = self.tables.block_ids(sequence.key)
        new = iter(table[len(hit.block_ids) :])
        for place, slot in enumerate(hit.host_slots, start=len(hit.block_ids)):
            target = next(new)
            self._moves.append(Move(MoveKind.BACK, slot, target))
            self.tables.pool.register(target, self._prefixes.hash_at(sequence.key, place))
        if hit.copy_of is not None:
            self._moves.append(Move(MoveKind.COPY, hit.copy_of, next(new)))
        self._prefixes.started(sequence.key, len(hit.block_ids) + len(hit.host_slots), hit.frontier)
        generation.found_computed(hit.tokens)
        self.known_tokens_total += sequence.known
        self.hit_tokens_total += hit.tokens
        self.host_hit_tokens_total += len(hit.host_slots) * self._block_size

    def grow(self, generation: Generation, reason: Reason) -> None:
        sequence = generation.sequence
        sequence.held_blocks = self.tables.grow(sequence.key, sequence.known, reason)

    def register(self, generation: Generation) -> None:
        """A sample came out of its KV without a fault: what it has computed is sound, and may be found."""
        sequence = generation.sequence
        self._prefixes.register(sequence.key, generation.tokens, self.tables.block_ids(sequence.key), sequence.computed)

    def release(self, generation: Generation, reason: Reason) -> None:
        """Gives its blocks back. What a failed sequence has touched is never found again."""
        sequence = generation.sequence
        if reason is Reason.FAIL:
            self._unregister(self.tables.block_ids(sequence.key))
        self._prefixes.stopped(sequence.key)
        self.tables.drop(sequence.key, reason)
        sequence.held_blocks = sequence.borrowed_blocks = 0

    # -- moves -------------------------------------------------------------------------------------------------------

    @property
    def moves(self) -> tuple[Move, ...]:
        """What has to be carried out before this step's pass, in this order."""
        return tuple(self._moves)

    def moves_lost(self) -> None:
        """The pass failed: whether the moves were carried out is not known, so nothing trusts their targets."""
        self._unregister(move.target for move in self._moves if move.kind is not MoveKind.OUT)
        if self.tier is not None:
            self.tier.forget(move.target for move in self._moves if move.kind is MoveKind.OUT)

    def check(self) -> None:
        """Raises LedgerDrift unless pool, tables and host slots balance. O(blocks)."""
        self.tables.check()
        if self.tier is not None:
            self.tier.check()

    # -- parts -------------------------------------------------------------------------------------------------------

    def _most_found(self, generation: Generation) -> int:
        """Full blocks that it may find computed: fewer than all its known tokens, so that there is a row to sample
        from."""
        return (generation.sequence.known - 1) // self._block_size

    def _source_of_last(self, generation: Generation, siblings: Iterable[Generation]) -> int | None:
        """A held block whose head is the KV of this sequence's last, perhaps partial, block but for the row to sample
        from: to be copied, since both will write into theirs.
        """
        sequence = generation.sequence
        last = (sequence.known - 1) // self._block_size
        if sequence.known % self._block_size == 0:
            twin = self.tables.pool.index.block_of(self._prefixes.hash_at(sequence.key, last))
            if twin is not None and self.tables.pool.references(twin):
                return twin
        if sequence.known > sequence.prompt_tokens:
            return None
        for sibling in siblings:
            if sibling is not generation and sibling.sequence.computed >= sequence.known - 1:
                return self.tables.block_ids(sibling.sequence.key)[last]
        return None

    def _slot(self, block_hash: bytes) -> int:
        slot = self.tier.slot_of(block_hash) if self.tier is not None else None
        if slot is None:
            raise LedgerDrift(f"host memory has lost block {block_hash.hex()} since it was found")
        return slot

    def _save(self, block_hash: bytes, block_id: int) -> None:
        move = self.tier.keep(block_hash, block_id) if self.tier is not None else None
        if move is not None:
            self._moves.append(move)

    def _unregister(self, block_ids: Iterable[int]) -> None:
        pool = self.tables.pool
        doubtful = tuple(block_ids)
        if self.tier is not None:
            names = (pool.index.hash_of(block_id) for block_id in doubtful)
            self.tier.discard([name for name in names if name is not None])
        pool.unregister(doubtful, Reason.FAIL)
