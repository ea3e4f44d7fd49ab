"""An answer whose replica died goes on at another one, where the rules of `core.seam` allow.

This is what both APIs share: whether an answer under way may be continued, and with what another replica is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from stoker.router import core, metrics
from stoker.router.fleet.pools import OK, Pool, Target
from stoker.router.flights.routing import Router
from stoker.router.prompts.decode import Partly
from stoker.router.prompts.plan import TOKENS, Plan
from stoker.router.prompts.prompt import CHAT, COMPLETIONS, Asked, Prompt

log = structlog.get_logger(__name__)

_COMPLETION_TOKENS = 16
"""What the API generates where a completion says nothing."""


@dataclass(slots=True)
class Course:
    """A request's way from replica to replica. `since` is when it came, by the router's clock."""

    since: float
    tried: frozenset[str] = frozenset()
    unlike: frozenset[str] = frozenset()
    """Replicas that would read other tokens than were said."""
    serving: str = ""
    """The replica that serves now; empty before there is one."""
    flowing: bool = False
    """That replica has said something."""

    @property
    def avoided(self) -> frozenset[str]:
        """Replicas that are not to be asked."""
        return self.tried | self.unlike


@dataclass(slots=True)
class Answer:
    """An answer under way that may be continued, should its replica die."""

    asked: Asked
    plan: Plan
    fields: Mapping[str, Any]
    """What the request sets, by vLLM's names."""
    default_tokens: int | None
    """Tokens that are generated where the request says nothing; None for as many as fit."""
    course: Course
    said: core.Said = field(default_factory=core.Said)

    @property
    def shows_tokens(self) -> bool:
        """Its reader asked for token ids itself."""
        return self.fields.get("return_token_ids") is True


@dataclass(frozen=True, slots=True)
class Rest:
    """What another replica is asked for. Counts are in tokens."""

    plan: Plan
    tokens: list[int]
    """The prompt, and what was said."""
    prompt_tokens: int
    """Of the prompt alone."""
    max_tokens: int
    min_tokens: int
    stops: core.Stops


class Continuations:
    """Knows which answers may go on elsewhere, and from where."""

    def __init__(self, router: Router, allowed: core.Continuation) -> None:
        self._router = router
        self._allowed = allowed

    def begin(self, asked: Asked, plan: Plan, fields: Mapping[str, Any], default_tokens: int = 0) -> Answer | None:
        """Something to note an answer in; None where it could not be continued.

        `default_tokens`: what a completion that says nothing may generate; 0 for the API's own.
        """
        one = asked.api in (CHAT, COMPLETIONS) and asked.stream and len(asked.prompt.texts) <= 1
        if (
            not one
            or plan.source != TOKENS
            or plan.pinned
            or len(plan.pool.targets) < 2
            or isinstance(fields, Partly)
        ):
            return None
        if core.obstacle(fields, self._allowed):
            return None
        default = default_tokens or _COMPLETION_TOKENS if asked.api == COMPLETIONS else None
        return Answer(asked, plan, fields, default, Course(self._router.clock()))

    async def rest(self, answer: Answer) -> Rest | None:
        """What to ask another replica for now that `serving` has failed; None where the answer has to end as it is.

        Spends a retry. What was said and is to be said anew is taken back from `answer.said`.
        """
        course = answer.course
        failed, course.serving = course.serving, ""
        target = self._router.view.targets.get(failed)
        course.tried |= {failed} if target is None else target.siblings
        why, rest = answer.said.broken, None
        if not why and not self._router.tries_left(course.tried):
            why = "refused"
        if not why:
            why, rest = await self._found(answer, failed)
        if not why and not self._router.may_retry(course.tried):
            why = "refused"
        metrics.of(metrics.CONTINUATIONS, why or "continued").inc()
        log.info("answer.broke_off", replica=failed, said=len(answer.said.tokens), continued=not why, why=why)
        return None if why else rest

    async def _found(self, answer: Answer, failed: str) -> tuple[str, Rest | None]:
        pool, said = answer.plan.pool, answer.said
        target = self._router.view.targets.get(failed)
        if target is not None and target.parity != OK:
            return "unproved", None  # whether it read the prompt as this router does
        skip = answer.fields.get("skip_special_tokens") is not False
        read = await self._router.planner.said(answer.asked.prompt, pool, said.tokens, skip_special_tokens=skip)
        where = core.seam(read[1], said.text) if read is not None else None
        if read is None or where is None:
            return "unlike", None
        prompt = read[0]
        left = _limit(answer, pool, len(prompt)) - where.kept
        if left < 1:
            return "no_room_left", None
        del said.tokens[where.kept :]
        tokens = [*prompt, *said.tokens]
        stop = answer.fields.get("stop") or ()
        stops = core.Stops(
            where,
            [stop] if isinstance(stop, str) else list(stop),
            include=answer.fields.get("include_stop_str_in_output") is True,
        )
        least = max(0, (answer.fields.get("min_tokens") or 0) - where.kept)
        answer.course.unlike = frozenset(other.id for other in pool.targets.values() if not _alike(other, pool))
        return "", Rest(await self._plan(answer, tokens, left), tokens, len(prompt), left, least, stops)

    async def prompt_tokens(self, answer: Answer) -> int | None:
        """How many tokens the prompt has; None where that is not known."""
        read = await self._router.planner.said(answer.asked.prompt, answer.plan.pool, (), skip_special_tokens=True)
        return None if read is None else len(read[0])

    async def _plan(self, answer: Answer, tokens: list[int], left: int) -> Plan:
        asked = answer.asked
        prompt = Prompt(
            b"", token_ids=(tokens,), max_output_tokens=left, choices=1, cache_salt=asked.prompt.cache_salt
        )
        again = Asked(COMPLETIONS, asked.model, prompt, True, asked.session_id, asked.priority)
        return await self._router.replan(answer.plan, again)


def _alike(target: Target, pool: Pool) -> bool:
    return target.parity == OK and target.record.engine.tokenizer_sha256 == pool.tokenizer_sha256


def _limit(answer: Answer, pool: Pool, prompt_tokens: int) -> int:
    """How many tokens the whole answer may have; 0 where that is not known."""
    room = pool.max_model_len - prompt_tokens if pool.max_model_len else None
    wanted = answer.asked.prompt.max_output_tokens
    wanted = answer.default_tokens if wanted is None else wanted
    bounds = [bound for bound in (room, wanted, pool.max_output_tokens or None) if bound is not None]
    return min(bounds, default=0)
