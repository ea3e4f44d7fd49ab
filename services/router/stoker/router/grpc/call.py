"""One call of the gRPC inference API: what came beside its message, and what is told, traced and counted of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Self

import grpc

from stoker.common import otel
from stoker.common.errors import StokerError
from stoker.common.otel import Span
from stoker.router import metrics
from stoker.router.decisions.decided import Decided, told

SERVICE = "stoker.api.inference.v1.InferenceService"

Context = grpc.aio.ServicerContext[Any, Any]


class Call:
    """Counted once, when its block ends, by how that came; its span ends with it."""

    def __init__(self, method: str, context: Context) -> None:
        """`method` is one of the service's."""
        self.metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        self.span = otel.begin(f"{SERVICE}/{method}", self.metadata)
        self.span.set(otel.RPC_SYSTEM, "grpc")
        self.span.set(otel.RPC_METHOD, f"{SERVICE}/{method}")
        self.outcome = "failed"
        self.read: Mapping[str, Any] = {}
        """Of its chat, for the prompt: the body for an engine is made of it too."""
        self._api = f"grpc_{method.lower()}"
        self._context = context
        self._clock = asyncio.get_running_loop().time
        self._arrived = self._clock()
        self._flows = False

    @property
    def time_left(self) -> float | None:
        """Seconds until its caller's deadline; None without one."""
        return self._context.time_remaining()

    def tell(self, decided: Decided) -> None:
        """Let its trailing metadata say what was decided, however it ends."""
        self._context.set_trailing_metadata(tuple(told(decided).items()))

    def trace(self, span: Span) -> Mapping[str, str]:
        """The trace context of a try, for the agent or the engine."""
        if span.headers:
            return span.headers
        return {key: self.metadata[key] for key in otel.CONTEXT_HEADERS if key in self.metadata}

    def first_token(self) -> None:
        """Output is here."""
        if not self._flows:
            metrics.of(metrics.TTFT, self._api).observe(self._clock() - self._arrived)
        self._flows = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            self.outcome = "cancelled"
        elif isinstance(error, StokerError):
            self.outcome = metrics.outcome_of(error)
        metrics.of(metrics.REQUESTS, self._api, self.outcome).inc()
        self.span.__exit__(kind, error, trace)
