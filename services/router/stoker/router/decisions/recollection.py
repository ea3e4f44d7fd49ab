"""Past decisions, of whichever worker of this router took them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from stoker.api.router.v1 import router_pb2
from stoker.router.decisions.decided import Recent, Remembered
from stoker.router.workers.siblings import Siblings

_ASK, _ANSWER = "explain", "explained"
_PATIENCE_S = 1.0  # a worker that has just died does not answer


@dataclass(slots=True)
class _Question:
    answer: asyncio.Future[router_pb2.ExplainResponse | None]
    unheard: int
    """Siblings that have not answered yet."""


class Recollection:
    """Looks among one's own last decisions, then asks the siblings."""

    def __init__(
        self,
        recent: Recent,
        siblings: Siblings,
        told: Callable[[Remembered], router_pb2.ExplainResponse],
    ) -> None:
        """`told` is how a decision is explained now."""
        self._recent = recent
        self._siblings = siblings
        self._told = told
        self._open: dict[str, _Question] = {}
        siblings.hears(_ASK, self._asked)
        siblings.hears(_ANSWER, self._answered)

    async def of(self, request_id: str) -> router_pb2.ExplainResponse | None:
        """The decision last taken for a request; None where nobody remembers it."""
        own = self._recent.of(request_id)
        others = self._siblings.count - 1
        if own is not None or not others:
            return self._told(own) if own is not None else None
        name = self._siblings.nonce().hex()
        question = self._open[name] = _Question(asyncio.get_running_loop().create_future(), others)
        self._siblings.tell_all(_ASK, msgspec.msgpack.encode((name, request_id)))
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await question.answer
        except TimeoutError:
            return None
        finally:
            del self._open[name]

    def _asked(self, said: bytes) -> None:
        name, request_id = msgspec.msgpack.decode(said, type=tuple[str, str])
        found = self._recent.of(request_id)
        told = self._told(found).SerializeToString() if found is not None else b""
        self._siblings.pass_on(name, _ANSWER, msgspec.msgpack.encode((name, told)))

    def _answered(self, said: bytes) -> None:
        name, told = msgspec.msgpack.decode(said, type=tuple[str, bytes])
        question = self._open.get(name)
        if question is None or question.answer.done():
            return
        question.unheard -= 1
        if told:
            question.answer.set_result(router_pb2.ExplainResponse.FromString(told))
        elif not question.unheard:
            question.answer.set_result(None)
