"""What `stoker doctor` finds about certificates: in files on this host, and on the way to a service."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import yaml

from stoker.common.errors import StokerError
from stoker.common.tls import ServerTlsConfig, Tls, TlsConfig, ends_soon, from_environment

SETTINGS = Path("/etc/stoker")
"""Where the services' settings are by docs/deploy.md."""

_HANDSHAKE_S = 3.0

Finding = tuple[Literal["ok", "warn", "fail"], str, str]


def certificates(settings: Path = SETTINGS) -> Finding:
    """Status, detail and fix: of this command's own environment, and of each service set up in `settings`."""
    good: list[str] = []
    soon: list[str] = []
    try:
        for where, secure in _in_use(settings):
            for setting, path, validity in secure.validity:
                told = soon if ends_soon(validity, time.time()) else good
                ends = time.strftime("%Y-%m-%d", time.gmtime(validity.ends))
                told.append(f"{where}: {setting} ({path}) until {ends}")
    except StokerError as error:
        return "fail", error.message, "see docs/security.md"
    if soon:
        return "warn", "; ".join(soon), "renew them; services take a new file without a restart"
    if not good:
        return "ok", "none set: plain text, for a private network only", ""
    return "ok", "; ".join(good), ""


def _in_use(settings: Path) -> Iterator[tuple[str, Tls]]:
    own = from_environment()
    if own is not None:
        yield "environment", own
    for file in sorted(settings.glob("*.yaml")) if os.access(settings, os.R_OK) else ():
        tree = _tree(file)
        for setting, kind in (("tls", TlsConfig), ("http_tls", ServerTlsConfig)):
            if setting not in tree:
                continue
            try:
                yield str(file), Tls(msgspec.convert(tree[setting], kind), setting)
            except StokerError as error:
                raise StokerError(f"{file}: {error.message}", reason=error.reason) from error
            except msgspec.ValidationError as error:
                raise StokerError(f"{file}: {setting}: {error}", reason="BAD_CONFIG") from error


def _tree(file: Path) -> dict[str, object]:
    try:
        tree = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise StokerError(f"{file} cannot be read: {error}", reason="BAD_CONFIG") from error
    return tree if isinstance(tree, dict) else {}


async def refusal(target: str, secure: Tls | None) -> tuple[str, str] | None:
    """Why a service that does not serve us refuses TLS, or we refuse it, and the fix; None if it is not for that."""
    context = secure.client_context() if secure is not None else _trusting_anyone()
    host, _, port = target.rpartition(":")
    try:
        async with asyncio.timeout(_HANDSHAKE_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
            writer.close()
    except ssl.SSLCertVerificationError as error:
        return (
            f"its certificate is refused: {error.verify_message}",
            "STOKER_TLS_CA must name its authority, and the certificate this address",
        )
    except (OSError, TimeoutError):
        return None
    if secure is None:
        return "it speaks TLS", "set STOKER_TLS_CA, and STOKER_TLS_CERTIFICATE and STOKER_TLS_KEY if it asks for one"
    return None


def _trusting_anyone() -> ssl.SSLContext:
    """To see whether a port speaks TLS at all; nothing is sent over it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context
