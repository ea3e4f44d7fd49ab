"""Tickets: a router's leave, signed, for one request at the places of a pick (ADR 35).

A ticket is text for one header: `key id.payload.signature`, the last two in URL-safe base64. The payload says
what the ticket is for; the signature is HMAC-SHA256 under a key that routers and node agents share by file.
"""

from __future__ import annotations

import binascii
import functools
import hmac
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from stoker.common.errors import Code, StokerError

HEADER = "x-stoker-ticket"
"""HTTP header or gRPC metadata that carries a ticket."""

MAX_TICKET_BYTES = 2048

_LINE = re.compile(r"([A-Za-z0-9_-]{1,32})\s+([0-9a-fA-F]{64,})")
_MAX_KEYS = 8


class TicketRefused(StokerError):
    """A ticket that is missing, forged, expired, used, or not for what it is shown for."""

    code = Code.PERMISSION_DENIED
    reason = "TICKET_INVALID"


class BadKeys(StokerError):
    """A file of ticket keys that cannot be used."""

    code = Code.FAILED_PRECONDITION
    reason = "BAD_TICKET_KEYS"


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """What a router allows. Times are Unix seconds, amounts tokens.

    Without places it is a router's pass, for the requests that the router itself sends: it never leaves the
    services, is good for any replica, and may be used often.
    """

    nonce: bytes
    expires: float
    places: tuple[tuple[str, int], ...] = ()
    """Replicas, each with its engine's epoch: a restarted one has lost the cache that the request was sent after."""
    tenant: str = ""
    prompt_tokens: int = 0
    """At most; 0 where the router could not count them."""
    output_tokens: int = 0
    """At most, all choices together; 0 where the caller named no bound."""

    @property
    def is_pass(self) -> bool:
        """Whether it is a router's own."""
        return not self.places


@dataclass(frozen=True)
class Keys:
    """Keys by id. The first signs, all are believed: so keys change without a moment in which a ticket fails."""

    first: str
    secrets: Mapping[str, bytes]

    encoder: ClassVar[msgspec.msgpack.Encoder] = msgspec.msgpack.Encoder()
    decoder: ClassVar[msgspec.msgpack.Decoder[Ticket]] = msgspec.msgpack.Decoder(Ticket)

    def sign(self, ticket: Ticket) -> str:
        """The ticket as text."""
        payload = self.encoder.encode(ticket)
        mac = self._begun.copy()
        mac.update(payload)
        return f"{self.first}.{_text(payload)}.{_text(mac.digest())}"

    @functools.cached_property
    def _begun(self) -> hmac.HMAC:
        # To set a MAC up costs more than to make it.
        return hmac.new(self.secrets[self.first], _domain(self.first), "sha256")

    def read(self, text: str, now: float, skew_s: float) -> Ticket:
        """A ticket that was signed by one of the keys, and is good at `now`, Unix seconds.

        `skew_s`: by how much the clocks of two hosts may differ. Raises TicketRefused.
        """
        if len(text) > MAX_TICKET_BYTES:
            raise TicketRefused(f"the ticket is longer than {MAX_TICKET_BYTES} bytes; send it as Pick gave it")
        key, _, rest = text.partition(".")
        body, _, signature = rest.partition(".")
        secret = self.secrets.get(key)
        if secret is None:
            raise TicketRefused(
                f"the ticket is signed by key {key[:32]!r}, which this node does not have; "
                "give routers and agents the same keys (tickets.keys)",
                reason="TICKET_KEY_UNKNOWN",
            )
        try:
            payload, given = urlsafe_b64decode(body), urlsafe_b64decode(signature)
        except (binascii.Error, ValueError):
            raise TicketRefused("this is no ticket; send it as Pick gave it") from None
        if not hmac.compare_digest(_mac(secret, key, payload), given):
            raise TicketRefused("the ticket's signature is wrong; send it as Pick gave it")
        try:
            ticket = self.decoder.decode(payload)
        except msgspec.DecodeError as error:
            raise TicketRefused(f"the ticket is of another version: {error}; upgrade agents first") from error
        if now > ticket.expires + skew_s:
            raise TicketRefused(
                f"the ticket ended {now - ticket.expires:.1f} s ago by this host's clock; pick again",
                reason="TICKET_EXPIRED",
            )
        return ticket


def parse(setting: str, path: str, content: str) -> Keys:
    """Keys of a file: one a line, `id secret`, the secret in hexadecimal. Raises BadKeys, which names `setting`."""
    secrets: dict[str, bytes] = {}
    for number, line in enumerate(content.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        match = _LINE.fullmatch(stripped)
        if match is None or len(match[2]) % 2:
            raise BadKeys(
                f"{setting}: line {number} of {path} is no key; write an id and at least 32 bytes in hexadecimal: "
                f'echo "$(date +%F) $(openssl rand -hex 32)"'
            )
        if match[1] in secrets:
            raise BadKeys(f"{setting}: {path} has key {match[1]!r} twice; give each key an id of its own")
        secrets[match[1]] = bytes.fromhex(match[2])
    if not secrets or len(secrets) > _MAX_KEYS:
        raise BadKeys(f"{setting}: {path} holds {len(secrets)} keys; write 1 to {_MAX_KEYS}, that which signs first")
    return Keys(next(iter(secrets)), secrets)


def _mac(secret: bytes, key: str, payload: bytes) -> bytes:
    return hmac.digest(secret, _domain(key) + payload, "sha256")


def _domain(key: str) -> bytes:
    return b"stoker.ticket.v1." + key.encode() + b"."


def _text(raw: bytes) -> str:
    return urlsafe_b64encode(raw).decode("ascii")
