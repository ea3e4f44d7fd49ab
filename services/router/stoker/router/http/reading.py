"""What every HTTP way into the router reads of a request, and says where it cannot."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Mapping

import structlog

from stoker.common.errors import DeadlineExceeded, InvalidRequest, StokerError
from stoker.router.prompts.decode import SMALL, decode
from stoker.router.prompts.prompt import CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, TOKENIZE, Asked, read

log = structlog.get_logger(__name__)

ROUTES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/embeddings": EMBEDDINGS,
    "/v1/responses": RESPONSES,
    "/tokenize": TOKENIZE,
}
"""The APIs of engines that the router decides for, by path."""

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


async def read_body(api: str, raw: bytes) -> Asked:
    """Decode and read a body, in a thread where it is large. Raises InvalidRequest."""
    if len(raw) <= SMALL:
        return read(api, decode(raw), raw)
    return await asyncio.to_thread(lambda: read(api, decode(raw), raw))


def request_id_of(headers: Mapping[str, str]) -> str:
    """The caller's own id, where it is one that can be logged; otherwise a new one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)


def seconds_allowed(headers: Mapping[str, str], most: float) -> float:
    """How long a request may take: `most` seconds, or less where its caller says so. Raises InvalidRequest."""
    text = headers.get("x-request-timeout")
    if text is None:
        return most
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise InvalidRequest.field("x-request-timeout", "must be a number of seconds above 0")
    return min(seconds, most)


def internal_error(event: str, path: str, error: Exception) -> StokerError:
    """Log what nobody foresaw; returns what to say of it."""
    incident = secrets.token_hex(4)
    log.error(event, path=path, incident=incident, exc_info=error)
    return StokerError(f"internal error; look for incident={incident} in the router's log")


def no_room_in_time() -> DeadlineExceeded:
    """What a request ends with whose time ran out while it waited for its turn."""
    return DeadlineExceeded(
        "no replica had room in time; ask again later, or allow more by x-request-timeout (seconds)"
    )
