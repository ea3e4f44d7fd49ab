"""Signs tickets."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from stoker.common.ticket_keys import KeyFile
from stoker.common.tickets import Keys, Ticket
from stoker.router.fleet.pools import Target
from stoker.router.prompts.plan import TOKENS, Plan

_PASS_S = 3600.0
"""Long, so that clocks which differ by minutes keep no router from its nodes."""
_RENEW_S = 600.0


class Signer:
    """Signs with the keys of now. Without any, tickets are empty, and no node asks for them."""

    def __init__(self, file: KeyFile, life_s: float, wall: Callable[[], float] = time.time) -> None:
        """`life_s`: seconds from a pick until its request must be at a node. `wall` gives Unix seconds."""
        self.life_s = life_s
        self._file = file
        self._wall = wall
        self._pass = ""
        self._pass_keys: Keys | None = None
        self._renew_at = 0.0

    def ticket(self, plan: Plan, targets: list[Target], nonce: bytes) -> str:
        """For a planned request, at each of these."""
        keys = self._file.keys
        if keys is None:
            return ""
        expires = self._wall() + self.life_s
        request = plan.request
        prompt = request.prompt_tokens if plan.source == TOKENS else 0
        output = request.output_tokens if plan.output_bounded else 0
        places = tuple((target.record.replica_id, target.record.epoch) for target in targets)
        return keys.sign(Ticket(nonce, expires, places, request.tenant, prompt, output))

    def own_pass(self) -> str:
        """What this router shows with requests that it sends itself; empty without keys."""
        keys, now = self._file.keys, self._wall()
        if keys is None:
            return ""
        # A clock that was set back must not leave it without one for as long.
        if keys is not self._pass_keys or not self._renew_at - _RENEW_S <= now < self._renew_at:
            self._pass = keys.sign(Ticket(secrets.token_bytes(12), now + _PASS_S))
            self._pass_keys, self._renew_at = keys, now + _RENEW_S
        return self._pass
