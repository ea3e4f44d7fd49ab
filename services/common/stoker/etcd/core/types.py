"""What the etcd layer speaks in: frozen values, keys as text, values as bytes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class KeyValue:
    """One key as etcd held it at some revision.

    `version` counts writes since the key was created; `lease` is 0 for a key that outlives its writer.
    """

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int = 0


@dataclass(frozen=True, slots=True)
class RangeResult:
    """All keys under a prefix, in key order, as of one `revision`."""

    revision: int
    kvs: tuple[KeyValue, ...]


class Target(Enum):
    """Which field of a key a comparison looks at; a key that is absent has 0 in every number."""

    VERSION = "version"
    CREATE_REVISION = "create_revision"
    MOD_REVISION = "mod_revision"
    VALUE = "value"
    LEASE = "lease"


class Is(Enum):
    """How a comparison compares."""

    EQUAL = "="
    NOT_EQUAL = "!="
    GREATER = ">"
    LESS = "<"


@dataclass(frozen=True, slots=True)
class Compare:
    """One condition of a transaction. `operand` is bytes for VALUE and an integer for the others."""

    key: str
    target: Target
    relation: Is
    operand: int | bytes

    def __post_init__(self) -> None:
        if isinstance(self.operand, bytes) != (self.target is Target.VALUE):
            raise TypeError(f"compare {self.target.value} of {self.key}: VALUE takes bytes, the others an int")

    @classmethod
    def absent(cls, key: str) -> Compare:
        """The key does not exist."""
        return cls(key, Target.VERSION, Is.EQUAL, 0)

    @classmethod
    def exists(cls, key: str) -> Compare:
        """The key exists, whatever it holds."""
        return cls(key, Target.VERSION, Is.GREATER, 0)

    @classmethod
    def unchanged(cls, kv: KeyValue) -> Compare:
        """The key was not written since `kv` was read."""
        return cls(kv.key, Target.MOD_REVISION, Is.EQUAL, kv.mod_revision)

    @classmethod
    def created_at(cls, key: str, revision: int) -> Compare:
        """The key is the one created at `revision`: a leader's fence, as long as it is not recreated."""
        return cls(key, Target.CREATE_REVISION, Is.EQUAL, revision)


@dataclass(frozen=True, slots=True)
class Put:
    """Write `value`; with `lease`, the key goes when the lease does."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Get:
    """Read one key, or every key that starts with it."""

    key: str
    prefix: bool = False


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete one key, or every key that starts with it."""

    key: str
    prefix: bool = False


Op = Put | Get | Delete


@dataclass(frozen=True, slots=True)
class OpResult:
    """What one operation of a transaction gave: `kvs` of a Get, `deleted` keys of a Delete."""

    kvs: tuple[KeyValue, ...] = ()
    deleted: int = 0


@dataclass(frozen=True, slots=True)
class TxnResult:
    """`succeeded` says which branch ran; `revision` is the store's after it; one response an operation."""

    succeeded: bool
    revision: int
    responses: tuple[OpResult, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything under the watched prefix at `revision`. A watch yields one, first, and never again."""

    revision: int
    kvs: tuple[KeyValue, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """What changed between the previous item of the watch and `revision`; no key appears twice.

    In unbroken history one delta is one etcd revision. After a compaction one delta holds the whole
    difference, so a key deleted and created again in between shows up as a put with a new create_revision.
    """

    revision: int
    puts: tuple[KeyValue, ...]
    deletes: tuple[str, ...]
