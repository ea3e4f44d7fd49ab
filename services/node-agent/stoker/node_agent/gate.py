"""Lets requests in that carry a router's ticket (ADR 35)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from stoker.api.inference.v1 import inference_pb2
from stoker.common.ticket_keys import KeyFile
from stoker.common.tickets import HEADER, Ticket, TicketRefused
from stoker.node_agent import telemetry
from stoker.node_agent.config import TicketsConfig
from stoker.node_agent.core.used import UsedTickets

Metadata = Iterable[tuple[str, str | bytes]] | None


class Gate:
    """Checks tickets where keys are set; without any it lets everything in."""

    def __init__(self, config: TicketsConfig, file: KeyFile, wall: Callable[[], float] = time.time) -> None:
        """`wall` gives Unix seconds."""
        self._config = config
        self._file = file
        self._wall = wall
        self._used = UsedTickets()

    def check(self, metadata: Metadata, replica_id: str, epoch: int) -> Ticket | None:
        """The ticket of a request for a replica in this epoch, now used; None where none is needed.

        Raises TicketRefused.
        """
        if self._file.keys is None:
            return None
        try:
            ticket = self._checked(metadata, replica_id, epoch)
        except TicketRefused as error:
            telemetry.TICKETS.labels(error.reason).inc()
            raise
        telemetry.TICKETS.labels("NONE" if ticket is None else "PASS" if ticket.is_pass else "OK").inc()
        return ticket

    def _checked(self, metadata: Metadata, replica_id: str, epoch: int) -> Ticket | None:
        text = next((value for name, value in metadata or () if name == HEADER and isinstance(value, str)), "")
        keys = self._file.keys
        if keys is None or (not text and not self._config.required):
            return None
        if not text:
            raise TicketRefused(
                f"this node takes requests with a router's ticket ({HEADER}) alone; ask a router, or Pick first",
                reason="TICKET_MISSING",
            )
        now = self._wall()
        ticket = keys.read(text, now, self._config.skew_s)
        if ticket.is_pass:
            return ticket
        epochs = [at for name, at in ticket.places if name == replica_id]
        if not epochs:
            raise TicketRefused(
                f"the ticket is not for replica {replica_id}; set replica_id to that of a place of the pick",
                reason="TICKET_WRONG_REPLICA",
            )
        if epoch not in epochs:
            raise TicketRefused(
                f"the engine of {replica_id} has restarted since the pick, and its cache is gone; pick again",
                reason="TICKET_STALE",
            )
        until = ticket.expires + self._config.skew_s
        # A pick may name several ranks of one replica; which of them a request says it is for proves nothing.
        uses = (b"%b%b@%d" % (ticket.nonce, replica_id.encode(), number) for number in range(len(epochs)))
        if not any(self._used.use(name, until, now) for name in uses):
            raise TicketRefused("the ticket was used before; it is for one request: pick again", reason="TICKET_USED")
        return ticket


def hold_to(ticket: Ticket | None, request: inference_pb2.GenerateRequest) -> None:
    """Raises TicketRefused (TICKET_EXCEEDED) for a request that is larger than the one that was picked."""
    if ticket is None or ticket.is_pass:
        return
    sampling = request.sampling
    if ticket.output_tokens:
        wanted = sampling.max_tokens * max(1, sampling.n) if sampling.HasField("max_tokens") else None
        if wanted is None or wanted > ticket.output_tokens:
            _refuse("sampling.max_tokens", wanted, ticket.output_tokens)
    # What text becomes only the engine knows.
    prompt = len(request.token_ids.ids)
    if ticket.prompt_tokens and prompt > ticket.prompt_tokens and not sampling.HasField("truncate_prompt_tokens"):
        _refuse("token_ids", prompt, ticket.prompt_tokens)


def _refuse(field: str, wanted: int | None, allowed: int) -> None:
    asked = "no bound" if wanted is None else f"{wanted} tokens"
    raise TicketRefused(
        f"{field}: the ticket is for {allowed} tokens, the request says {asked}; send what was picked",
        reason="TICKET_EXCEEDED",
    )
