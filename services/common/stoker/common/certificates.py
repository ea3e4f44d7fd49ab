"""Certificates in PEM files: read, checked before anything uses them, and how long they are valid."""

from __future__ import annotations

import base64
import calendar
import contextlib
import os
import re
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stoker.common.errors import StokerError

_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----\s(.+?)-----END CERTIFICATE-----", re.DOTALL)
_MAX_BYTES = 4 << 20
"""A bundle of every public authority is a tenth of it."""

_VERSION, _UTC_TIME = 0xA0, 0x17


class BadCertificate(StokerError):
    """A certificate or a key that cannot be used; the message names the setting, the file and the fix."""

    reason = "BAD_CERTIFICATE"


@dataclass(frozen=True)
class Validity:
    """From when until when, Unix seconds."""

    begins: float
    ends: float


def read(setting: str, path: str) -> bytes:
    """A file's bytes. Raises BadCertificate, which names `setting`."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except PermissionError:
        raise BadCertificate(
            f"{setting}: no permission to read {path}; let the service's user read it (chgrp stoker, chmod 640)"
        ) from None
    except OSError as error:
        raise BadCertificate(f"{setting}: cannot read {path}: {error.strerror}; correct the path") from error
    if len(content) > _MAX_BYTES:
        raise BadCertificate(f"{setting}: {path} is larger than {_MAX_BYTES >> 20} MiB; it cannot be the right file")
    return content


def validities(setting: str, path: str, pem: bytes) -> list[Validity]:
    """How long each certificate of a PEM file is valid, in order. Raises BadCertificate where there is none."""
    try:
        found = [_validity(base64.b64decode(match[1])) for match in _CERTIFICATE.finditer(pem)]
    except (ValueError, IndexError) as error:
        raise BadCertificate(f"{setting}: {path} holds a damaged certificate; replace it") from error
    if not found:
        raise BadCertificate(f"{setting}: {path} holds no certificate; write PEM (-----BEGIN CERTIFICATE-----)")
    return found


def check_pair(setting: str, certificate_path: str, key_path: str, chain: bytes, key: bytes) -> None:
    """Raises BadCertificate unless `key` is the leaf's."""
    try:
        load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), chain, key)
    except _Encrypted:
        raise BadCertificate(
            f"{setting}: {key_path} is encrypted; write it without a passphrase, readable by the service alone"
        ) from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise BadCertificate(
                f"{setting}: {key_path} is not the key of {certificate_path}; put the key made with it there"
            ) from error
        raise BadCertificate(
            f"{setting}: {key_path} with {certificate_path} is not usable ({error.reason or error}); "
            "write both as PEM, the chain with its leaf first"
        ) from error


def check_authorities(setting: str, path: str, pem: bytes) -> None:
    """Raises BadCertificate unless every certificate of the bundle can be trusted."""
    try:
        load_authorities(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), pem)
    except (ssl.SSLError, ValueError) as error:
        raise BadCertificate(f"{setting}: {path} is no bundle of authorities ({error}); write PEM") from error


def load_pair(context: ssl.SSLContext, chain: bytes, key: bytes) -> None:
    """Make a context show a certificate. Raises ssl.SSLError."""
    with _as_file(key + b"\n" + chain) as path:
        context.load_cert_chain(path, password=_no_password)


def load_authorities(context: ssl.SSLContext, pem: bytes) -> None:
    """Make a context trust a bundle. Raises ssl.SSLError or ValueError."""
    context.load_verify_locations(cadata=b"\n".join(match[0] for match in _CERTIFICATE.finditer(pem)).decode("ascii"))


class _Encrypted(Exception):
    pass


def _no_password() -> bytes:
    # Without a callback OpenSSL would ask on the terminal.
    raise _Encrypted


@contextlib.contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """The bytes under a path, in memory alone: `ssl` takes pairs from files, and what was checked must be used."""
    descriptor = os.memfd_create("stoker-tls", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


# --- just enough DER (X.690) to find Certificate.tbsCertificate.validity (RFC 5280, 4.1) --------------------


def _validity(der: bytes) -> Validity:
    _, at, _ = _element(der, 0)  # Certificate
    _, at, _ = _element(der, at)  # TBSCertificate
    tag, _, end = _element(der, at)
    if tag == _VERSION:
        at = end
    for _ in ("serialNumber", "signature", "issuer"):
        _, _, at = _element(der, at)
    _, at, _ = _element(der, at)
    first = _element(der, at)
    return Validity(_time(der, first), _time(der, _element(der, first[2])))


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Tag of the element at `at`, where its content begins, and where it ends."""
    tag, length, at = der[at], der[at + 1], at + 2
    if length >= 0x80:
        size = length & 0x7F
        length = int.from_bytes(der[at : at + size], "big")
        at += size
    if at + length > len(der):
        raise ValueError("an element ends beyond its certificate")
    return tag, at, at + length


def _time(der: bytes, element: tuple[int, int, int]) -> float:
    tag, start, end = element
    text = der[start:end].decode("ascii")
    if tag == _UTC_TIME:
        text = ("19" if text[:2] >= "50" else "20") + text
    return float(calendar.timegm(time.strptime(text, "%Y%m%d%H%M%SZ")))
