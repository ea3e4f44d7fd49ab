"""etcd's messages, and their translation from and to the layer's own values."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from stoker.etcd.core.types import Compare, Delete, Get, Is, KeyValue, Op, OpResult, Put, Target
from stoker.etcd.core.watch import Event


def _load(name: str) -> Any:
    """Import a generated module, which has no types, and leave `sys.path` as it was.

    Importing its stubs, etcd3aio puts its own folder, with a `google` of its own, in front of everything.
    """
    path = list(sys.path)
    module = import_module(name)
    sys.path[:] = path
    return module


# Loaded first, so that the common definitions win over the copies that etcd3aio carries.
_load("google.api.annotations_pb2")
rpc: Any = _load("etcd3aio._protobuf").rpc_pb2
stubs: Any = _load("etcd3aio._protobuf").rpc_pb2_grpc

# Calls fail at once on a member that has lost its quorum, and streams are ended, instead of serving the past.
HAS_LEADER = (("hasleader", "true"),)

_DELETE_EVENT = 1


def encode(key: str) -> bytes:
    """A key as bytes. Keys that are not UTF-8 survive the round trip."""
    return key.encode("utf-8", "surrogateescape")


def decode(key: bytes) -> str:
    """The inverse of `encode`."""
    return key.decode("utf-8", "surrogateescape")


def prefix_end(prefix: bytes) -> bytes:
    r"""The first key after all that start with `prefix`; `\0` means "to the end"."""
    trimmed = prefix.rstrip(b"\xff")
    return trimmed[:-1] + bytes([trimmed[-1] + 1]) if trimmed else b"\0"


def span(key: str, prefix: bool) -> dict[str, bytes]:
    r"""The `key` and `range_end` fields for one key or a prefix; the empty prefix is everything."""
    start = encode(key)
    return {"key": start or b"\0", "range_end": prefix_end(start)} if prefix else {"key": start}


def key_value(kv: Any) -> KeyValue:
    """Translate mvccpb.KeyValue."""
    return KeyValue(decode(kv.key), kv.value, kv.create_revision, kv.mod_revision, kv.version, kv.lease)


def event(message: Any) -> Event:
    """Translate mvccpb.Event."""
    kv = message.kv
    put = None if message.type == _DELETE_EVENT else key_value(kv)
    return Event(kv.mod_revision, decode(kv.key), put)


_RELATION = {
    Is.EQUAL: rpc.Compare.EQUAL,
    Is.NOT_EQUAL: rpc.Compare.NOT_EQUAL,
    Is.GREATER: rpc.Compare.GREATER,
    Is.LESS: rpc.Compare.LESS,
}
_TARGET = {
    Target.VERSION: rpc.Compare.VERSION,
    Target.CREATE_REVISION: rpc.Compare.CREATE,
    Target.MOD_REVISION: rpc.Compare.MOD,
    Target.VALUE: rpc.Compare.VALUE,
    Target.LEASE: rpc.Compare.LEASE,
}


def compare(condition: Compare) -> Any:
    """A condition as etcdserverpb.Compare."""
    return rpc.Compare(
        key=encode(condition.key),
        target=_TARGET[condition.target],
        result=_RELATION[condition.relation],
        **{condition.target.value: condition.operand},
    )


def request_op(op: Op) -> Any:
    """An operation as etcdserverpb.RequestOp."""
    match op:
        case Put(key, value, lease):
            return rpc.RequestOp(request_put=rpc.PutRequest(key=encode(key), value=value, lease=lease))
        case Get(key, prefix):
            return rpc.RequestOp(request_range=rpc.RangeRequest(**span(key, prefix)))
        case Delete(key, prefix):
            return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(**span(key, prefix)))


def op_result(response: Any) -> OpResult:
    """Translate etcdserverpb.ResponseOp."""
    match response.WhichOneof("response"):
        case "response_range":
            return OpResult(kvs=tuple(key_value(kv) for kv in response.response_range.kvs))
        case "response_delete_range":
            return OpResult(deleted=response.response_delete_range.deleted)
        case _:
            return OpResult()
