"""Decisions as they are recorded: one JSON object a line. No prompt, no request id, no name of a tenant."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec


class Record(msgspec.Struct, omit_defaults=True, frozen=True):
    """One try of one request, written when it has ended.

    `at` is when it was ready to be decided, Unix seconds; all other times are seconds from then. `keys` are the u64
    keys of its full blocks, little-endian (base64 in JSON). What is unknown is left out.
    """

    at: float
    model: str
    replica: str
    reason: str
    prompt_tokens: int
    block_size: int
    keys: bytes = b""
    adapter: str = ""
    policy: str = "stoker"
    source: str = "tokens"
    """What the keys were made from: tokens, bytes or none."""
    output_tokens: int = 0
    """Asked for, or guessed."""
    tenant: str = ""
    """Stands for the tenant within what one process records."""
    priority: int = 0
    weight: float = 1.0
    session: int = 0
    predicted_tokens: int = 0
    """Of the prompt, expected in the cache."""
    candidates: int = 0
    cost_s: float | None = None
    waited_s: float = 0.0
    attempt: int = 1
    outcome: Literal["ok", "fault", "caller"] = "ok"
    ttft_s: float | None = None
    """Only where the first token was seen: in streams."""
    took_s: float = 0.0
    cached_tokens: int | None = None
    """Of the prompt, as the engine says."""
    generated_tokens: int | None = None
    kv_blocks: int = 0
    """Of the replica."""
    prefill_rate: float | None = None
    """Of the replica, tokens/s."""

    def block_keys(self) -> tuple[int, ...]:
        """The keys as numbers. Raises ValueError where the bytes are none."""
        keys = array("Q")
        keys.frombytes(self.keys)
        return tuple(keys)


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Record)


def encoded(record: Record) -> bytes:
    """A line, its end included."""
    return _ENCODER.encode(record) + b"\n"


def decoded(lines: Iterable[bytes]) -> Iterator[Record]:
    """The records of a file's lines. Raises ValueError, whose text names the line.

    Lines that a kill cut off are passed over, but for the first: there it is no such file.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = _DECODER.decode(line)
            record.block_keys()
        except (msgspec.DecodeError, ValueError) as error:
            if number > 1 and type(error) is msgspec.DecodeError:
                continue
            raise ValueError(f"line {number} is no record of a decision: {error}") from error
        yield record


def packed(keys: Sequence[int]) -> bytes:
    """Keys as they are recorded."""
    return array("Q", keys).tobytes()


def tenant_tag(tenant: str, secret: bytes) -> str:
    """Stands for a tenant; without the secret nobody can tell for whom."""
    return hashlib.blake2b(tenant.encode(), key=secret, digest_size=6).hexdigest() if tenant else ""
