"""The pure decisions of the etcd layer."""

from __future__ import annotations

import pytest

from stoker.common.errors import Code, StokerError
from stoker.etcd import wire
from stoker.etcd.core.endpoints import Endpoints
from stoker.etcd.core.failure import Kind, judge
from stoker.etcd.core.lease import Term, extend
from stoker.etcd.core.types import KeyValue
from stoker.etcd.core.watch import Event, Resume, complete, deltas, diff, resume
from stoker.etcd.errors import EtcdNoLeader, EtcdRejected, EtcdUnavailable, LeaseLost, to_error


def kv(key: str, revision: int) -> KeyValue:
    return KeyValue(key, b"", revision, revision, 1)


def test_endpoints_are_sticky_until_they_fail_and_not_left_for_a_recovered_one() -> None:
    endpoints = Endpoints(3, first=4)
    assert endpoints.pick(0) == endpoints.pick(100) == 1
    endpoints.failed(1, avoid_until=105)
    assert endpoints.pick(100) == 2
    assert endpoints.pick(106) == 2, "1 is good again, which is no reason to leave 2"
    endpoints.failed(2, avoid_until=120)
    assert endpoints.pick(106) == 0


def test_with_every_endpoint_failing_the_one_soonest_good_is_tried() -> None:
    endpoints = Endpoints(3)
    for index, until in enumerate((30.0, 10.0, 20.0)):
        endpoints.failed(index, until)
    assert not endpoints.has_good(9)
    assert endpoints.pick(9) == 1
    assert endpoints.failures(1) == 1
    endpoints.succeeded(1)
    assert endpoints.has_good(9)
    assert endpoints.failures(1) == 0


@pytest.mark.parametrize(
    ("status", "text", "kind", "maybe_applied"),
    [
        ("UNAVAILABLE", "failed to connect to all addresses; last error: refused", Kind.UNREACHABLE, False),
        ("UNAVAILABLE", "Socket closed", Kind.UNREACHABLE, True),
        ("UNAVAILABLE", "recvmsg:Connection reset by peer", Kind.UNREACHABLE, True),
        ("UNAVAILABLE", "etcdserver: no leader", Kind.NO_LEADER, False),
        ("UNAVAILABLE", "etcdserver: request timed out", Kind.UNREACHABLE, True),
        ("UNAVAILABLE", "etcdserver: leader changed", Kind.UNREACHABLE, True),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", Kind.TIMEOUT, True),
        ("CANCELLED", "grpc: the client connection is closing", Kind.UNREACHABLE, True),
        ("RESOURCE_EXHAUSTED", "etcdserver: too many requests", Kind.BUSY, False),
        ("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded", Kind.NO_SPACE, False),
        ("RESOURCE_EXHAUSTED", "CLIENT: Received message larger than max (40 vs. 32)", Kind.TOO_LARGE, True),
        ("INVALID_ARGUMENT", "etcdserver: request is too large", Kind.TOO_LARGE, False),
        ("OUT_OF_RANGE", "etcdserver: mvcc: required revision has been compacted", Kind.COMPACTED, False),
        ("OUT_OF_RANGE", "etcdserver: mvcc: required revision is a future revision", Kind.REJECTED, False),
        ("NOT_FOUND", "etcdserver: requested lease not found", Kind.LEASE_GONE, False),
        ("FAILED_PRECONDITION", "etcdserver: lease already exists", Kind.LEASE_EXISTS, False),
        ("PERMISSION_DENIED", "etcdserver: permission denied", Kind.DENIED, False),
        ("INVALID_ARGUMENT", "etcdserver: too many operations in txn request", Kind.REJECTED, False),
    ],
)
def test_failures_are_judged(status: str, text: str, kind: Kind, maybe_applied: bool) -> None:
    failure = judge(status, text)
    assert (failure.kind, failure.maybe_applied) == (kind, maybe_applied)


def test_errors_have_stable_reasons_and_say_where() -> None:
    error = to_error("put", judge("UNAVAILABLE", "etcdserver: no leader"), "10.0.0.1:2379")
    assert isinstance(error, EtcdNoLeader)
    assert isinstance(error, EtcdUnavailable)
    assert isinstance(error, StokerError)
    assert (error.reason, error.code, error.retry_after_s) == ("ETCD_NO_LEADER", Code.UNAVAILABLE, 1.0)
    assert error.message == "etcd put at 10.0.0.1:2379: etcdserver: no leader"
    gone = to_error("put", judge("NOT_FOUND", "etcdserver: requested lease not found"), "x")
    assert isinstance(gone, LeaseLost)
    assert gone.retry_after_s is None
    assert type(to_error("put", judge("INVALID_ARGUMENT", "bad"), "x")) is EtcdRejected


def test_a_lease_is_renewed_at_a_third_and_lost_a_ttl_after_it_was_asked_for() -> None:
    term = Term(sent=100.0, ttl=9.0)
    assert (term.renew_at, term.deadline) == (103.0, 109.0)
    assert term.attempt_timeout(103.0) == 3.0
    assert term.attempt_timeout(108.0) == 1.0
    assert term.attempt_timeout(200.0) == 0.0
    assert extend(term, sent=103.0, ttl=9.0) == Term(103.0, 9.0)
    assert extend(term, sent=99.0, ttl=9.0) == term, "an old answer does not shorten it"


def test_history_continues_unless_the_store_went_back_or_was_replaced() -> None:
    assert resume(10, 7, 10, 7) is Resume.CONTINUE
    assert resume(10, 7, 11, 7) is Resume.CONTINUE
    assert resume(10, 7, 9, 7) is Resume.RELOAD_ALL
    assert resume(10, 7, 11, 8) is Resume.RELOAD_ALL


def test_a_difference_holds_what_changed_and_nothing_else() -> None:
    known = {"kept": 1, "changed": 2, "deleted": 3}
    present = [kv("added", 9), kv("changed", 8), kv("kept", 1)]
    change = diff(known, present, 9, Resume.RELOAD)
    assert [each.key for each in change.puts] == ["added", "changed"]
    assert change.deletes == ("deleted",)
    every = diff(known, present, 9, Resume.RELOAD_ALL)
    assert [each.key for each in every.puts] == ["added", "changed", "kept"], "revisions prove nothing now"
    assert every.deletes == ("deleted",)


def test_a_revision_cut_by_a_fragment_waits_for_its_rest() -> None:
    a, b, c = Event(1, "a", None), Event(2, "b", None), Event(2, "c", None)
    ready, held = complete([], [a, b], more=True)
    assert (ready, held) == ([a], [b])
    assert complete(held, [c], more=False) == ([b, c], [])
    assert complete([], [], more=True) == ([], [])


def test_what_was_delivered_is_dropped_and_each_revision_is_one_delta() -> None:
    events = [Event(4, "a", kv("a", 4)), Event(5, "b", None), Event(5, "c", kv("c", 5))]
    (change,) = deltas(events, after=4)
    assert (change.revision, change.puts, change.deletes) == (5, (kv("c", 5),), ("b",))


@pytest.mark.parametrize(
    ("prefix", "end"),
    [(b"/a/", b"/a0"), (b"a", b"b"), (b"a\xff", b"b"), (b"\xff\xff", b"\0"), (b"", b"\0")],
)
def test_the_end_of_a_prefix(prefix: bytes, end: bytes) -> None:
    assert wire.prefix_end(prefix) == end
