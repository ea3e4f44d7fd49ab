"""A small authority for tests: certificates for 127.0.0.1, written as a renewal tool would."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, PEM."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        return self.key_pem_under(serialization.NoEncryption())

    def key_pem_under(self, encryption: serialization.KeySerializationEncryption) -> bytes:
        return self.key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)

    @property
    def ends(self) -> float:
        return self.certificate.not_valid_after_utc.timestamp()


class Authority:
    """Signs."""

    def __init__(self, name: str = "test authority", days: float = 365) -> None:
        self.own = self._make(name, None, days, authority=True)

    @property
    def pem(self) -> bytes:
        return self.own.pem

    def pair(self, name: str = "service", days: float = 30, age_days: float = 1) -> Pair:
        """A certificate for 127.0.0.1 that is `age_days` old and ends in `days` days."""
        return self._make(name, self.own, days, age_days)

    @staticmethod
    def _make(name: str, issuer: Pair | None, days: float, age_days: float = 1, *, authority: bool = False) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer.certificate.subject if issuer else subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - age_days * DAY)
            .not_valid_after(now + days * DAY)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if not authority:
            here = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
            builder = builder.add_extension(
                x509.SubjectAlternativeName([here, x509.DNSName("localhost")]), critical=False
            )
        return Pair(builder.sign(issuer.key if issuer else key, hashes.SHA256()), key)


@dataclass(frozen=True)
class Files:
    """Where a service's certificates lie."""

    folder: Path

    @property
    def certificate(self) -> Path:
        return self.folder / "service.pem"

    @property
    def key(self) -> Path:
        return self.folder / "service-key.pem"

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    def write(self, pair: Pair, authority: Authority) -> Files:
        self.folder.mkdir(exist_ok=True)
        self.ca.write_bytes(authority.pem)
        self.key.write_bytes(pair.key_pem)
        self.certificate.write_bytes(pair.pem)
        return self

    def settings(self, *, mutual: bool = True) -> list[str]:
        """As `--set` takes them."""
        told = [f"tls.certificate={self.certificate}", f"tls.key={self.key}", f"tls.ca={self.ca}"]
        return [*told, f"tls.client_ca={self.ca}"] if mutual else told

    def environment(self) -> dict[str, str]:
        """For the command line."""
        return {
            "STOKER_TLS_CERTIFICATE": str(self.certificate),
            "STOKER_TLS_KEY": str(self.key),
            "STOKER_TLS_CA": str(self.ca),
        }
