"""One model's replicas as this router sees them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import records_pb2
from stoker.openai import RANK_HEADER
from stoker.router import core
from stoker.router.fleet.remembered_keys import RememberedKeys

_T = TypeVar("_T", str, int)

PENDING = "pending"
OK = "ok"
TOKENIZER_MISMATCH = "tokenizer_mismatch"
BLOCK_SIZE_MISMATCH = "block_size_mismatch"

_ROLES = {common_pb2.ROLE_PREFILL: core.Role.PREFILL, common_pb2.ROLE_DECODE: core.Role.DECODE}
_DEFAULT_BLOCK_SIZE = 16


def target_ids(record: records_pb2.Replica) -> list[str]:
    """The ids of a replica's targets: its own, or one for each data-parallel rank where it has several."""
    ranks = record.engine.data_parallel
    return [record.replica_id] if ranks < 2 else [rank_id(record.replica_id, rank) for rank in range(ranks)]


def rank_id(replica_id: str, rank: int) -> str:
    """The id of one data-parallel rank of a replica."""
    return f"{replica_id}@{rank}"


def replicas_of(targets: Iterable[str]) -> set[str]:
    """The ids of the replicas that targets, by their ids, are of: ranks are tried and fail together."""
    return {target.rpartition("@")[0] or target for target in targets}


@dataclass(slots=True, eq=False)
class Target:
    """Where requests go: a replica, or one data-parallel rank of it, as announced and as this router found it.

    A rank has a scheduler and a KV cache of its own: for the decision it is a replica.
    """

    record: records_pb2.Replica
    rank: int | None = None
    """Data-parallel rank; None where the replica is one cache."""
    pool: Pool | None = None
    reachable: bool = True
    """False once a connection was refused, until a health check succeeds."""
    parity: str = PENDING
    """"ok", "pending", or what differs: then its cache earns no credit."""
    takes_chat_tokens: bool = False
    """Its engine takes a chat's tokens from beside the messages, as the parity probe found."""
    in_flight: int = 0
    waiting: set[Callable[[], None]] = field(default_factory=set)
    """Of each request that waits there for its first token: what to call when the replica is found dead."""
    prefill_rate: float | None = None
    """Tokens/s, as last reported; None while unknown."""
    load_tokens: float | None = None
    """As last reported; None while unknown."""
    ready_at: float | None = None
    """When this life of its engine became ready, by the router's monotonic clock; None where that was not seen."""
    _begun: int | None = None  # the epoch of the last life that was ready
    id: str = field(init=False)
    """The replica's id, with the rank where there is one."""
    url: str = field(init=False)
    """Base URL of its engine, without a trailing slash."""

    def __post_init__(self) -> None:
        name = self.record.replica_id
        self.id = name if self.rank is None else rank_id(name, self.rank)
        self.announced(self.record)

    def announced(self, record: records_pb2.Replica) -> None:
        """Take what is announced of it now."""
        self.record = record
        self.url = record.engine.http_url.rstrip("/")

    def begins(self, now: float | None) -> None:
        """Note when a new life of the engine has become ready."""
        if self.record.state == records_pb2.STATE_READY and self._begun != self.record.epoch:
            self._begun, self.ready_at = self.record.epoch, now

    def found_dead(self) -> None:
        """A direct check says that it will not answer: those who wait there for their first token may leave."""
        for leave in list(self.waiting):
            leave()

    @property
    def headers(self) -> dict[str, str]:
        """What tells its engine which rank is meant."""
        return {} if self.rank is None else {RANK_HEADER: str(self.rank)}

    @property
    def siblings(self) -> frozenset[str]:
        """The ids of all targets that this one's engine serves, its own among them: they live and die together."""
        return frozenset((self.id,)) if self.rank is None else frozenset(target_ids(self.record))

    @property
    def known_blocks(self) -> int:
        """KV blocks that its digest shows, all tiers together."""
        return self.pool.fleet.index.count(self.id) if self.pool is not None else 0

    @property
    def ready(self) -> bool:
        """Announced as ready, asked to run, and not found dead."""
        return self.record.state == records_pb2.STATE_READY and self.reachable and not self.draining

    @property
    def draining(self) -> bool:
        """Takes nothing new."""
        return self.record.state == records_pb2.STATE_DRAINING or self.record.wanted == records_pb2.WANTED_DRAIN

    @property
    def retiring(self) -> bool:
        """About to drain: takes only what it alone holds."""
        return self.record.wanted == records_pb2.WANTED_RETIRE

    def reads_by(self, tokenizer_sha256: str) -> bool:
        """Whether it is proved to read a prompt as this router does with that tokenizer."""
        return self.parity == OK and self.record.engine.tokenizer_sha256 == tokenizer_sha256

    @property
    def refused(self) -> str:
        """Why prefix routing is refused for it; empty where it is not."""
        engine = self.record.engine
        if self.parity not in (OK, PENDING):
            return self.parity
        if self.pool is not None and engine.tokenizer_sha256 != self.pool.tokenizer_sha256:
            return TOKENIZER_MISMATCH
        if self.pool is not None and engine.block_size != self.pool.block_size:
            return BLOCK_SIZE_MISMATCH
        return ""


@dataclass(slots=True, eq=False)
class Pool:
    """The replicas that serve one model, with the core's view of them."""

    model: str
    fleet: core.Fleet
    targets: dict[str, Target] = field(default_factory=dict)
    tokenizer_sha256: str = ""
    block_size: int = _DEFAULT_BLOCK_SIZE
    max_model_len: int = 0
    """Tokens, prompt plus output; 0 where unknown."""
    max_output_tokens: int = 0
    """Tokens that a request may ask to generate; 0 for as many as fit."""
    adapters: frozenset[str] = frozenset()
    able: set[str] = field(default_factory=set)
    """Targets that are ready."""
    remembered: RememberedKeys = field(default_factory=RememberedKeys)

    def settle(self) -> None:
        """Take what most replicas share as the pool's own, and announce each to the core accordingly."""
        engines = [target.record.engine for target in self.targets.values()]
        self.tokenizer_sha256 = _commonest(engine.tokenizer_sha256 for engine in engines) or ""
        alike = [engine for engine in engines if engine.tokenizer_sha256 == self.tokenizer_sha256]
        self.block_size = _commonest(engine.block_size for engine in alike) or _DEFAULT_BLOCK_SIZE
        # The tightest: what it admits, all do.
        self.max_model_len = min((engine.max_model_len for engine in engines if engine.max_model_len), default=0)
        self.adapters = frozenset(name for engine in engines for name in engine.model_names[1:])
        for target in self.targets.values():
            self.announce(target)

    def announce(self, target: Target) -> None:
        """Tell the core how a replica stands now."""
        engine, ready = target.record.engine, target.ready
        (self.able.add if ready else self.able.discard)(target.id)
        # A block size of 0 matches no request: the core then credits nothing and routes it by load alone.
        self.fleet.put(
            core.Replica(
                id=target.id,
                block_size=0 if target.refused else engine.block_size,
                prefill_rate=target.prefill_rate,
                kv_blocks=engine.total_blocks // max(1, engine.data_parallel),
                role=_ROLES.get(target.record.role, core.Role.BOTH),
                ready=ready,
                draining=target.draining,
                adapters=frozenset(engine.model_names[1:]),
                ready_at=target.ready_at,
                retiring=target.retiring,
            )
        )


def _commonest(values: Iterable[_T]) -> _T | None:
    counts = Counter(value for value in values if value)
    return max(counts, key=lambda value: (counts[value], value), default=None)
