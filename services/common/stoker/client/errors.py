"""What a call ends with that fails."""

from __future__ import annotations

from stoker.common.errors import (
    Code,
    Conflict,
    DeadlineExceeded,
    Exhausted,
    InvalidRequest,
    NotFound,
    StokerError,
    Unavailable,
)
from stoker.common.tickets import TicketRefused

_KINDS: dict[Code, type[StokerError]] = {
    Code.INVALID_ARGUMENT: InvalidRequest,
    Code.NOT_FOUND: NotFound,
    Code.UNAVAILABLE: Unavailable,
    Code.FAILED_PRECONDITION: Conflict,
    Code.RESOURCE_EXHAUSTED: Exhausted,
    Code.DEADLINE_EXCEEDED: DeadlineExceeded,
}


class Interrupted(StokerError):
    """A stream that broke after its first token. What had come is valid; `reason` is the failure's own.

    `text` and `token_ids` hold that, by choice. Nobody has repeated the request: the rest would differ.
    """

    code = Code.UNAVAILABLE

    def __init__(self, cause: StokerError, text: dict[int, str], token_ids: dict[int, list[int]]) -> None:
        characters = sum(map(len, text.values()))
        super().__init__(
            f"the stream broke after {characters} characters of output, which are in `text`: {cause.message}",
            reason=cause.reason,
            code=cause.code,
            metadata=cause.metadata,
        )
        self.text = text
        self.token_ids = token_ids


def typed(error: StokerError) -> StokerError:
    """The same error as the class that its code, or a ticket's reason, stands for."""
    if type(error) is not StokerError:
        return error
    kind = TicketRefused if error.reason.startswith("TICKET_") else _KINDS.get(error.code)
    if kind is None:
        return error
    return kind(
        error.message,
        reason=error.reason,
        code=error.code,
        retry_after_s=error.retry_after_s,
        fields=error.fields,
        metadata=error.metadata,
    )
