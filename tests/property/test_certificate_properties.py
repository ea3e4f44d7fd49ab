"""Certificates damaged in any way are refused, never a surprise."""

from __future__ import annotations

import contextlib
import ssl

from cryptography.hazmat.primitives import serialization
from hypothesis import given
from hypothesis import strategies as st

from stoker.common import certificates
from stoker.common.certificates import BadCertificate
from tests.support.certificates import Authority

DER = Authority().pair().certificate.public_bytes(serialization.Encoding.DER)


def read(pem: bytes) -> None:
    with contextlib.suppress(BadCertificate):
        for validity in certificates.validities("tls.ca", "ca.pem", pem):
            assert isinstance(validity.ends, float)
    with contextlib.suppress(BadCertificate):
        certificates.check_authorities("tls.ca", "ca.pem", pem)


@given(st.lists(st.tuples(st.integers(0, len(DER) - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_flipped_bytes(changes: list[tuple[int, int]]) -> None:
    der = bytearray(DER)
    for place, value in changes:
        der[place] = value
    read(ssl.DER_cert_to_PEM_cert(bytes(der)).encode())


@given(st.binary(max_size=300))
def test_any_bytes_in_an_envelope(der: bytes) -> None:
    read(ssl.DER_cert_to_PEM_cert(der).encode())


@given(st.binary(max_size=300))
def test_any_text_in_an_envelope(text: bytes) -> None:
    read(b"-----BEGIN CERTIFICATE-----\n" + text + b"\n-----END CERTIFICATE-----\n")
    with contextlib.suppress(BadCertificate):
        certificates.check_pair("tls.key", "service.pem", "key.pem", text, text)
