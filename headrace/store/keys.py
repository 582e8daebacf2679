"""Every key of one model, in one place. All share one hash tag, so a model lives in one slot (DESIGN section 5).

The Lua functions receive `Keys.board` as their one declared key and derive the others from its prefix with the same
names; the contract suite compares every key of both, so the two maps cannot drift apart.
"""

from __future__ import annotations

import hashlib
import secrets

LAYOUT = "hr1"


def model_tag(cluster_id: str, model: str) -> str:
    """Short hash of the cluster's id and the model's name: the part of a key that Redis Cluster hashes."""
    return hashlib.blake2b(f"{cluster_id}\0{model}".encode(), digest_size=6).hexdigest()


def incarnation(name: str) -> str:
    """A fresh incarnation `<name>~<nonce>` of a worker or router: one life of one process."""
    return f"{name}~{secrets.token_hex(6)}"


def name_of(member: str) -> str:
    """The name in an incarnation."""
    return member.rsplit("~", 1)[0]


class Keys:
    """The key map of one model. Attributes are single keys, methods are families."""

    def __init__(self, cluster_id: str, model: str) -> None:
        self.tag = model_tag(cluster_id, model)
        self.prefix = f"{LAYOUT}:{{{self.tag}}}:"
        self.board = self.prefix + "board"
        """hash: worker → header and last load report"""
        self.lease = self.prefix + "lease"
        """zset: `w:`/`r:` + incarnation → expiry"""
        self.fenced = self.prefix + "fenced"
        """zset: incarnations that may not come back → when that is forgotten"""
        self.lost = self.prefix + "lost"
        """set: fenced incarnations whose requests a sweep still has to move"""
        self.open = self.prefix + "open"
        """set: workers whose last report had room; an index into the board, never the truth"""
        self.queue = self.prefix + "queue"
        """zset: every waiting id → rank"""
        self.resume = self.prefix + "resume"
        """zset: waiting ids that have already delivered tokens → rank"""
        self.due = self.prefix + "due"
        """zset: id → deadline, end of grace or end of the result's life"""
        self.meta = self.prefix + "meta"
        """hash: the sweep's last call, quiet time, capacity, drain rate, virtual times"""

    def request(self, request_id: str) -> str:
        """hash: the record."""
        return f"{self.prefix}req:{request_id}"

    def journal(self, request_id: str, choice: int) -> str:
        """string: packed output tokens of one choice."""
        return f"{self.prefix}tok:{request_id}:{choice}"

    def logprobs(self, request_id: str, choice: int) -> str:
        """string: one record per output token of a choice that tells log probabilities (`headrace.codec`)."""
        return f"{self.prefix}lp:{request_id}:{choice}"

    def prompt_logprobs(self, request_id: str) -> str:
        """string: one record per prompt token, written whole."""
        return f"{self.prefix}plp:{request_id}"

    def wait(self, band: int, tenant: str) -> str:
        """zset: the tenant's waiting ids by rank."""
        return f"{self.prefix}wait:{band}:{tenant}"

    def fair(self, band: int) -> str:
        """zset: tenants that wait → virtual token counter (in blocks)."""
        return f"{self.prefix}fair:{band}"

    def account(self, tenant: str) -> str:
        """hash: what a tenant has in the store, and its counters while nothing of it waits."""
        return f"{self.prefix}acct:{tenant}"

    def held(self, worker: str) -> str:
        """hash: id → `<epoch>:<mark>:<owner>`; the one look-up that fences a frame's parts."""
        return f"{self.prefix}held:{worker}"

    def own(self, router: str) -> str:
        """zset: ids that the router delivers, by the time it took them."""
        return f"{self.prefix}own:{router}"

    def inbox(self, worker: str) -> str:
        """stream: binds, cancels, new owners, drain orders."""
        return f"{self.prefix}inbox:{worker}"

    def out(self, router: str) -> str:
        """stream, length-bounded: parts for delivery."""
        return f"{self.prefix}out:{router}"

    def idempotency(self, tenant: str, key: str) -> str:
        """string: request id. The tenant's length keeps `a:b`+`c` and `a`+`b:c` apart."""
        return f"{self.prefix}idem:{len(tenant.encode())}:{tenant}:{key}"
