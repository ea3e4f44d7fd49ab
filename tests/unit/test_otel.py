"""Spans: whose trace they belong to, what they pass on, and that an exporter's trouble stays its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client import REGISTRY

from stoker.common import otel
from stoker.common.errors import InvalidRequest, StokerError, Unavailable

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = f"00-{TRACE}-b7ad6b7169203331-01"
QUIET = f"00-{TRACE}-b7ad6b7169203331-00"


def counted(result: str) -> float:
    return REGISTRY.get_sample_value("stoker_trace_spans_total", {"result": result}) or 0.0


def test_a_process_without_an_endpoint_records_nothing_and_passes_nothing_on() -> None:
    with otel.traced("test", ""):
        span = otel.begin("x", {"traceparent": CALLER})
    assert span is otel.NOT_TRACED
    assert span.child("y") is span
    assert otel.carried({"Traceparent": CALLER}, span) == {"Traceparent": CALLER}


def test_a_callers_trace_goes_on() -> None:
    memory = InMemorySpanExporter()
    caller = {"traceparent": CALLER, "tracestate": "vendor=1"}
    with (
        otel.recorded("test", memory),
        otel.begin("request", caller) as span,
        span.child("engine", calls=True) as child,
    ):
        assert span.recording
        passed = otel.carried({"TraceParent": CALLER, "Tracestate": "vendor=1", "x": "1"}, child)
    child_span, whole = memory.get_finished_spans()
    assert child_span.context is not None
    assert whole.context is not None
    assert whole.parent is not None
    assert whole.context.trace_id == int(TRACE, 16)
    assert whole.parent.span_id == 0xB7AD6B7169203331
    assert child_span.parent == whole.context
    assert passed == {
        "x": "1",
        "traceparent": f"00-{TRACE}-{child_span.context.span_id:016x}-01",
        "tracestate": "vendor=1",
    }


_ZEROS = "00-" + "0" * 32 + "-" + "0" * 16 + "-01"


@pytest.mark.parametrize("nonsense", ["", "x", CALLER[:-1], _ZEROS, "ff" + CALLER[2:]])
def test_what_is_no_context_begins_a_new_trace(nonsense: str) -> None:
    memory = InMemorySpanExporter()
    with otel.recorded("test", memory), otel.begin("request", {"traceparent": nonsense}):
        pass
    [span] = memory.get_finished_spans()
    assert span.parent is None


def test_what_a_caller_does_not_sample_is_not_recorded_and_its_word_goes_on() -> None:
    memory = InMemorySpanExporter()
    with otel.recorded("test", memory), otel.begin("request", {"traceparent": QUIET}) as span:
        assert otel.carried({"traceparent": QUIET}, span) == {"traceparent": QUIET}
    assert not memory.get_finished_spans()


def test_chance_decides_only_where_the_caller_has_not_and_is_passed_on() -> None:
    memory = InMemorySpanExporter()
    with otel.recorded("test", memory, sample=0.0):
        with otel.begin("request", {}) as span:
            passed = otel.carried({"x": "1"}, span)
            assert otel.carried({}, span.child("engine")) == span.headers
        with otel.begin("sampled", {"traceparent": CALLER}):
            pass
    assert [span.name for span in memory.get_finished_spans()] == ["sampled"]
    assert passed["traceparent"].endswith("-00")
    assert len(passed["traceparent"]) == len(CALLER)


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (InvalidRequest("x"), "INVALID_REQUEST", StatusCode.UNSET),
        (Unavailable("x"), "UNAVAILABLE", StatusCode.ERROR),
        (StokerError("x", reason="BAD_STREAM"), "BAD_STREAM", StatusCode.ERROR),
        (ValueError("x"), "ValueError", StatusCode.ERROR),
        (asyncio.CancelledError(), "CancelledError", StatusCode.UNSET),
    ],
)
def test_how_it_ended(error: BaseException, kind: str, status: StatusCode) -> None:
    memory = InMemorySpanExporter()
    with otel.recorded("test", memory), pytest.raises(type(error)), otel.begin("request", {}):
        raise error
    [span] = memory.get_finished_spans()
    assert (span.attributes or {})[otel.ERROR_TYPE] == kind
    assert span.status.status_code is status


class Stuck(SpanExporter):
    """Takes one batch, and does not come back before it may."""

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.entered = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.entered.set()
        self.may_go.wait(30)
        return SpanExportResult.FAILURE


def test_no_more_spans_wait_than_may_and_nobody_waits_for_them() -> None:
    full, lost = counted("queue_full"), counted("not_sent")
    stuck = Stuck()
    with otel.recorded("test", stuck, most_waiting=8):
        for _ in range(100):
            otel.begin("request", {}).end()
        assert counted("queue_full") - full == 92
        assert stuck.entered.wait(10)
        stuck.may_go.set()
    assert counted("not_sent") - lost == 8


class Broken(SpanExporter):
    def __init__(self) -> None:
        self.asked = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked += 1
        raise OSError("down")


def test_an_exporter_that_fails_costs_its_spans_and_is_asked_once_more_at_the_end() -> None:
    lost = counted("not_sent")
    broken = Broken()
    with otel.recorded("test", broken, most_waiting=2000):
        for _ in range(1600):
            otel.begin("request", {}).end()
    assert counted("not_sent") - lost == 1600
    assert broken.asked <= 5  # batches while it ran; at its end one at most


def test_a_span_outlives_its_process_harmlessly() -> None:
    with otel.recorded("test", InMemorySpanExporter()):
        span = otel.begin("request", {})
    child = span.child("late")
    assert child.headers == span.headers
    child.end()
    span.end()
