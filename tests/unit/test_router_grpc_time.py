"""How long a gRPC call may still take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stoker.router.config import LimitsConfig
from stoker.router.grpc.inference import InferenceServer


@pytest.mark.parametrize(
    ("now", "callers", "left"),
    [(0.0, None, 60.0), (45.0, None, 15.0), (45.0, 5.0, 5.0), (45.0, 30.0, 15.0), (99.0, None, 0.0)],
)
def test_waiting_and_earlier_tries_use_up_a_calls_time(now: float, callers: float | None, left: float) -> None:
    router: Any = SimpleNamespace(clock=lambda: now)
    call: Any = SimpleNamespace(time_left=callers)
    server = InferenceServer(router, None, LimitsConfig(request_s=60.0))  # type: ignore[arg-type] # not asked
    assert server._time_left(call, since=0.0) == left
