"""What an engine's silence means to the caller of a unary method."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest

from stoker.api.inference.v1 import inference_pb2
from stoker.common.errors import DeadlineExceeded, StokerError, Unavailable
from stoker.common.ticket_keys import KeyFile
from stoker.node_agent.config import TicketsConfig
from stoker.node_agent.gate import Gate
from stoker.node_agent.server import InferenceServer


class Silent:
    """An HTTP session whose calls end in a given way."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def post(self, *_: object, **__: object) -> Silent:
        return self

    async def __aenter__(self) -> None:
        raise self._error

    async def __aexit__(self, *_: object) -> None: ...


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (TimeoutError(), DeadlineExceeded),
        (aiohttp.ServerDisconnectedError(), Unavailable),
        (aiohttp.ConnectionTimeoutError(), Unavailable),
        (ConnectionResetError(), Unavailable),
    ],
)
async def test_only_an_engine_that_is_away_is_unavailable(error: Exception, raised: type[StokerError]) -> None:
    life = SimpleNamespace(client=SimpleNamespace(base_url="http://engine"))
    runner = SimpleNamespace(replica_id="a", life=life, member=SimpleNamespace(epoch=1))
    supervisor = SimpleNamespace(serving=lambda replica_id, model: runner)
    context = SimpleNamespace(time_remaining=lambda: 5.0, invocation_metadata=lambda: ())
    gate = Gate(TicketsConfig(), KeyFile(""))
    server = InferenceServer(cast(Any, supervisor), cast(Any, None), cast(Any, Silent(error)), 1, gate)
    with pytest.raises(raised):
        await server.Embed(inference_pb2.EmbedRequest(model="m", texts=["x"]), cast(Any, context))
