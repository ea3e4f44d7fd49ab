"""Spans on their way out: a bounded number waits, a thread sends them, and each is counted by what became of it.

Apart from `otel`, so that a process without traces need not load the SDK.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from prometheus_client import Counter

log = structlog.get_logger(__name__)

SPANS = Counter(
    "stoker_trace_spans_total", "Spans by what became of them.", ["result"]
)  # result: sent, not_sent, queue_full

_PERIOD_MS = 1000.0


class Outgoing(SpanProcessor):
    """Hands ended spans to an exporter, in batches. Never waits for it."""

    def __init__(self, exporter: SpanExporter, most_waiting: int, batch: int) -> None:
        self._exporter = _Counting(exporter)
        self._most_waiting = most_waiting
        self._told = 0  # counted by those who end spans alone: the event loop
        self._batches = BatchSpanProcessor(
            self._exporter, most_waiting, _PERIOD_MS, max_export_batch_size=min(batch, most_waiting)
        )

    def on_end(self, span: ReadableSpan) -> None:
        """Take a span, or drop it where too many wait."""
        if self._told - self._exporter.taken >= self._most_waiting:
            SPANS.labels("queue_full").inc()
            return
        self._told += 1
        self._batches.on_end(span)

    def shutdown(self) -> None:
        """Send what is left, as long as that succeeds."""
        self._exporter.ending = True
        self._batches.shutdown()  # type: ignore[no-untyped-call]  # the SDK's

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Send all now; for tests."""
        return self._batches.force_flush(timeout_millis)


class _Counting(SpanExporter):
    """An exporter whose failures are counted, and told once."""

    def __init__(self, inner: SpanExporter) -> None:
        self.taken = 0  # counted by the exporting thread alone
        self.ending = False
        self._inner = inner
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch; one that fails is lost. While the process ends, nothing is tried behind a failure."""
        try:
            sent = not (self.ending and self._failing) and self._inner.export(spans) is SpanExportResult.SUCCESS
        except Exception as error:  # noqa: BLE001 - traces never cost more than themselves
            log.debug("traces.export_failed", error=repr(error))
            sent = False
        self.taken += len(spans)
        SPANS.labels("sent" if sent else "not_sent").inc(len(spans))
        if self._failing and sent:
            log.info("traces.sent_again")
        elif not sent and not self._failing:
            log.warning("traces.not_sent", spans=len(spans), counted_in="stoker_trace_spans_total")
        self._failing = not sent
        return SpanExportResult.SUCCESS if sent else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        """Close the exporter."""
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing waits here."""
        return True
