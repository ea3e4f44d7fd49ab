"""Documents that operators write: packed small enough for etcd, and unpacked within a bound."""

from __future__ import annotations

import zlib

from stoker.common.errors import InvalidRequest

MAX_DOCUMENT_BYTES = 16 * 1024 * 1024
MAX_PACKED_BYTES = 1024 * 1024
"""etcd takes 1.5 MiB in a transaction."""
_LEVEL = 9


def packed(document: str, field: str = "facility") -> bytes:
    """A document, compressed. Raises InvalidRequest naming `field` where it is too large, before or after."""
    text = document.encode()
    if len(text) > MAX_DOCUMENT_BYTES:
        raise InvalidRequest.field(field, f"has {len(text)} bytes; at most {MAX_DOCUMENT_BYTES} are kept")
    small = zlib.compress(text, _LEVEL)
    if len(small) > MAX_PACKED_BYTES:
        raise InvalidRequest.field(
            field,
            f"has {len(small)} bytes when compressed; at most {MAX_PACKED_BYTES} are kept: write ranges rather than "
            "lists",
        )
    return small


def unpacked(small: bytes, field: str = "facility") -> str:
    """The document, whatever `small` inflates to being bounded. Raises InvalidRequest naming `field`."""
    if len(small) > MAX_PACKED_BYTES:
        raise InvalidRequest.field(field, f"has {len(small)} bytes; at most {MAX_PACKED_BYTES} are kept")
    stream = zlib.decompressobj()
    try:
        text = stream.decompress(small, MAX_DOCUMENT_BYTES)
    except zlib.error as error:
        raise InvalidRequest.field(field, f"is not compressed by zlib: {error}") from None
    if stream.unconsumed_tail:
        raise InvalidRequest.field(field, f"inflates to more than {MAX_DOCUMENT_BYTES} bytes; no more are kept")
    if not stream.eof or stream.unused_data:
        raise InvalidRequest.field(field, "is cut short, or has something after its end")
    try:
        return text.decode()
    except UnicodeDecodeError:
        raise InvalidRequest.field(field, "is no UTF-8 text") from None
