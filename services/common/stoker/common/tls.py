"""TLS between Stoker's services: certificates from files, renewed ones taken without a restart.

A service shows one certificate to those who call it and to those it calls. New connections are made with what
the files hold now; connections that are open go on with what they began with.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Annotated

import grpc
import structlog
from msgspec import Meta
from prometheus_client import Gauge

from stoker.common import certificates
from stoker.common.certificates import BadCertificate, Validity
from stoker.common.config import ConfigError

log = structlog.get_logger(__name__)

POLL_S = 10.0
"""How often the files are read again, seconds."""

_DAY_S = 86_400.0
_WARN_S = 14 * _DAY_S

_EXPIRY = Gauge(
    "stoker_tls_certificate_expiry_timestamp_seconds",
    "When what a TLS setting names in use ends to be valid, Unix seconds.",
    ["setting"],
)


@dataclass(frozen=True)
class ServerTlsConfig:
    """Certificates of a port, PEM files. With all empty it speaks plain text."""

    certificate: Annotated[str, Meta(description="PEM chain to show, leaf first; empty for plain text")] = ""
    key: Annotated[str, Meta(description="PEM key of the certificate, without a passphrase")] = ""
    client_ca: Annotated[
        str, Meta(description="PEM bundle of authorities; callers must show a certificate of theirs. Empty: none")
    ] = ""


@dataclass(frozen=True)
class TlsConfig(ServerTlsConfig):
    """Certificates of a service, PEM files. With all empty it speaks plain text."""

    ca: Annotated[str, Meta(description="PEM bundle of the authorities of the services that this one calls")] = ""


@dataclass(frozen=True)
class _Material:
    """What the files held at one moment, checked."""

    chain: bytes = b""
    key: bytes = field(default=b"", repr=False)
    client_ca: bytes = b""
    ca: bytes = b""
    validity: tuple[tuple[str, str, Validity], ...] = ()
    """Setting, file, and how long it is good for."""


class Tls:
    """Certificates as the files of `config` hold them. Raises ConfigError, BadCertificate.

    `setting` is the name of `config` in errors, logs and metrics; `clock` gives Unix seconds.
    """

    def __init__(self, config: ServerTlsConfig, setting: str = "tls", clock: Callable[[], float] = time.time) -> None:
        _require_whole(config, setting)
        self._config = config
        self._setting = setting
        self._clock = clock
        self._material = _Material()
        self._context: ssl.SSLContext | None = None
        self._warned_at: dict[str, float] = {}
        self._failures = 0
        self._on_renewal: Callable[[Tls], None] = lambda _: None
        self.generation = 0
        """Rises whenever the files held something new."""
        self._take(_read(config, setting))
        self._warn()

    @property
    def validity(self) -> tuple[tuple[str, str, Validity], ...]:
        """Each setting in use, its file, and how long that is good for."""
        return self._material.validity

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a gRPC port: each handshake is with the newest certificate."""
        given = self.generation

        def newest() -> grpc.ServerCertificateConfiguration | None:
            nonlocal given
            if given == self.generation:
                return None
            given = self.generation
            return self._certificate_configuration()

        return grpc.dynamic_ssl_server_credentials(
            self._certificate_configuration(),
            newest,  # type: ignore[arg-type]  # None says that nothing changed
            require_client_authentication=bool(self._config.client_ca),
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a gRPC channel: its connections are made with what the files hold now."""
        held = self._material
        return grpc.ssl_channel_credentials(held.ca or None, held.key or None, held.chain or None)

    def client_pem(self) -> tuple[bytes, bytes | None, bytes | None]:
        """Authorities, chain and key for a client that takes PEM; the latter two None where there are none."""
        held = self._material
        return held.ca, held.chain or None, held.key or None

    def on_renewal(self, callback: Callable[[Tls], None]) -> None:
        """Have `callback` called, on the event loop that follows, when the files have come to hold something new."""
        self._on_renewal = callback

    def client_context(self, protocol: str = "h2") -> ssl.SSLContext:
        """For a connection that gRPC does not make, with what the files hold now; `protocol` by its ALPN name."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.set_alpn_protocols([protocol])
        certificates.load_authorities(context, self._material.ca)
        if self._material.chain:
            certificates.load_pair(context, self._material.chain, self._material.key)
        return context

    def server_context(self) -> ssl.SSLContext:
        """For an HTTP/1.1 port: each handshake is with the newest certificate, and trusts the newest authorities."""
        first = self._new_context()
        self._context = first

        def newest(connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _first: ssl.SSLContext) -> None:
            assert self._context is not None  # noqa: S101 - set above
            connection.context = self._context

        first.sni_callback = newest
        return first

    async def follow(self) -> None:
        """Take what the files come to hold, and warn before it ends, for ever."""
        while True:
            await asyncio.sleep(POLL_S)
            before = self.generation
            try:
                await asyncio.to_thread(self.look)
                if self.generation != before:
                    self._on_renewal(self)
            except Exception:  # whoever stops looking serves a certificate until it ends
                log.exception("tls.look_failed", setting=self._setting)

    def look(self) -> None:
        """Read the files once more. What cannot be used is not taken: the certificate in use stays."""
        try:
            self._take(_read(self._config, self._setting))
        except BadCertificate as error:
            self._failures += 1
            # Not the first time: certificate and key are two files, and the one is written before the other.
            if self._failures == 2:
                log.error("tls.renewal_not_taken", setting=self._setting, error=error.message)
        else:
            self._failures = 0
        self._warn()

    def _take(self, material: _Material) -> None:
        if material == self._material:
            return
        self._material = material
        if self._context is not None:
            self._context = self._new_context()
        self.generation += 1
        for setting, path, validity in material.validity:
            _EXPIRY.labels(setting).set(validity.ends)
            log.info("tls.taken", setting=setting, file=path, ends=_date(validity.ends))

    def _warn(self) -> None:
        now = self._clock()
        for setting, path, validity in self._material.validity:
            since = now - self._warned_at.get(setting, float("-inf"))
            if not ends_soon(validity, now) or abs(since) < _DAY_S:
                continue
            self._warned_at[setting] = now
            tell = log.error if now >= validity.ends else log.warning
            tell(
                "tls.certificate_expired" if now >= validity.ends else "tls.certificate_expires",
                setting=setting,
                file=path,
                ends=_date(validity.ends),
                action="renew the file; it is taken without a restart",
            )

    def _certificate_configuration(self) -> grpc.ServerCertificateConfiguration:
        held = self._material
        return grpc.ssl_server_certificate_configuration(
            [(held.key, held.chain)], root_certificates=held.client_ca or None
        )

    def _new_context(self) -> ssl.SSLContext:
        held = self._material
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        certificates.load_pair(context, held.chain, held.key)
        if held.client_ca:
            certificates.load_authorities(context, held.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
            # A resumed session shows no certificate: who was admitted once would be for hours, whatever is trusted.
            context.options |= ssl.OP_NO_TICKET
            context.num_tickets = 0
        return context


def ends_soon(validity: Validity, now: float) -> bool:
    """Whether it should have been renewed by `now`, Unix seconds: two weeks before its end, or in its last third.

    A third, or certificates that live for a day would always be late.
    """
    return now >= validity.ends - min(_WARN_S, (validity.ends - validity.begins) / 3)


@contextlib.asynccontextmanager
async def following(
    config: ServerTlsConfig, setting: str = "tls", *, serves: bool = True
) -> AsyncIterator[Tls | None]:
    """The certificates of a service, kept up to date while the block runs; None where it speaks plain text.

    Not `serves`: they are for calls alone, which need no certificate of their own.
    """
    if config == type(config)():
        yield None
        return
    if serves and not config.certificate:
        raise ConfigError(f"{setting}.certificate: is missing, so callers would be served in plain text; name a file")
    tls = Tls(config, setting)
    task = asyncio.create_task(tls.follow(), name=f"follow {setting}")
    try:
        yield tls
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def from_environment() -> Tls | None:
    """Certificates of a command: STOKER_TLS_CA, and STOKER_TLS_CERTIFICATE and STOKER_TLS_KEY where asked for."""
    config = TlsConfig(
        certificate=os.environ.get("STOKER_TLS_CERTIFICATE", ""),
        key=os.environ.get("STOKER_TLS_KEY", ""),
        ca=os.environ.get("STOKER_TLS_CA", ""),
    )
    return Tls(config, "STOKER_TLS") if config != TlsConfig() else None


def _require_whole(config: ServerTlsConfig, setting: str) -> None:
    """Half a configuration would leave half the connections in plain text: refuse it."""
    for given, missing in (("certificate", "key"), ("key", "certificate"), ("client_ca", "certificate")):
        if getattr(config, given) and not getattr(config, missing):
            raise ConfigError(
                f"{_name(setting, missing)}: is missing, but {_name(setting, given)} is given; name both files"
            )
    if isinstance(config, TlsConfig) and not config.ca:
        raise ConfigError(f"{_name(setting, 'ca')}: is missing; name the authorities of the services that are called")


def _read(config: ServerTlsConfig, setting: str) -> _Material:
    pem, validity = {}, []
    for name in ("certificate", "client_ca", "ca"):
        path = getattr(config, name, "")
        named = _name(setting, name)
        pem[name] = certificates.read(named, path) if path else b""
        if not path:
            continue
        found = certificates.validities(named, path, pem[name])
        if name == "certificate":
            # A chain is as good as its weakest link; of authorities, the old one may end when a new one is there.
            ends = min(found, key=lambda one: one.ends)
        else:
            ends = max(found, key=lambda one: one.ends)
            certificates.check_authorities(named, path, pem[name])
        validity.append((named, path, ends))
    named = _name(setting, "key")
    key = certificates.read(named, config.key) if config.key else b""
    if key:
        certificates.check_pair(named, config.certificate, config.key, pem["certificate"], key)
    return _Material(pem["certificate"], key, pem["client_ca"], pem["ca"], tuple(validity))


def _name(setting: str, field: str) -> str:
    """As the user wrote it: a setting, or a variable of the environment."""
    return f"{setting}_{field}".upper() if setting.isupper() else f"{setting}.{field}"


def _date(unix_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_s))
