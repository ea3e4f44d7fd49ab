"""Certificates from files: what is refused and how it is said, renewal under a running port, and the warning."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from aiohttp import ClientError, ClientSession, TCPConnector, web
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from stoker.common import certificates, rpc, tls
from stoker.common.certificates import BadCertificate
from stoker.common.channels import Channels
from stoker.common.config import ConfigError
from stoker.common.tls import ServerTlsConfig, Tls, TlsConfig
from stoker.etcd import Tls as EtcdTls
from tests.support.certificates import Authority, Files, Pair
from tests.support.waiting import eventually

DAY_S = 86_400.0


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def files(tmp_path: Path, authority: Authority) -> Files:
    return Files(tmp_path / "tls").write(authority.pair("first"), authority)


def config(files: Files, *, mutual: bool = True) -> TlsConfig:
    return TlsConfig(
        certificate=str(files.certificate),
        key=str(files.key),
        ca=str(files.ca),
        client_ca=str(files.ca) if mutual else "",
    )


# What is refused


@pytest.mark.parametrize("days", [0.5, 30, 20_000, 2_000_000])
def test_validity_is_read_as_another_implementation_reads_it(authority: Authority, days: float) -> None:
    pair = authority.pair(days=days)
    (found,) = certificates.validities("s", "f", pair.pem)
    assert found.ends == pair.ends
    assert found.begins == pair.certificate.not_valid_before_utc.timestamp()


def test_a_certificate_cut_short_anywhere_is_refused_and_never_a_surprise(authority: Authority) -> None:
    der = authority.pair().certificate.public_bytes(serialization.Encoding.DER)
    for length in range(0, len(der), 7):
        with pytest.raises(BadCertificate, match=r"f holds (no|a damaged) certificate"):
            certificates.validities("s", "f", ssl.DER_cert_to_PEM_cert(der[:length]).encode())


def break_key(files: Files) -> str:
    files.key.write_bytes(Authority().pair().key_pem)
    return rf"tls\.key: {files.key} is not the key of {files.certificate}; put"


def encrypt_key(files: Files) -> str:
    pair = Authority().pair()
    files.certificate.write_bytes(pair.pem)
    files.key.write_bytes(pair.key_pem_under(serialization.BestAvailableEncryption(b"secret")))
    return rf"tls\.key: {files.key} is encrypted; write"


def lose_certificate(files: Files) -> str:
    files.certificate.unlink()
    return rf"tls\.certificate: cannot read {files.certificate}: No such file"


def swap(files: Files) -> str:
    files.certificate.write_bytes(files.key.read_bytes())
    return rf"tls\.certificate: {files.certificate} holds no certificate; write PEM"


def empty_ca(files: Files) -> str:
    files.ca.write_bytes(b"\n")
    return rf"tls\.(client_)?ca: {files.ca} holds no certificate"


def folder_as_ca(files: Files) -> str:
    files.ca.unlink()
    files.ca.mkdir()
    return rf"tls\.(client_)?ca: cannot read {files.ca}: Is a directory"


@pytest.mark.parametrize("spoil", [break_key, encrypt_key, lose_certificate, swap, empty_ca, folder_as_ca])
def test_what_cannot_be_used_is_refused_naming_setting_file_and_fix(files: Files, spoil: Any) -> None:
    said = spoil(files)
    with pytest.raises(BadCertificate, match=said):
        Tls(config(files))


def test_a_file_without_permission_is_named(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)  # root may read everything
    with pytest.raises(BadCertificate, match=rf"tls\.certificate: no permission to read {files.certificate}; let"):
        Tls(config(files))


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"certificate": "c", "ca": "a"}, "tls.key"),
        ({"key": "k", "ca": "a"}, "tls.certificate"),
        ({"client_ca": "a", "ca": "a"}, "tls.certificate"),
        ({"certificate": "c", "key": "k"}, "tls.ca"),
        ({"ca": "a"}, "tls.certificate"),
    ],
)
async def test_half_a_configuration_is_refused_rather_than_half_in_plain_text(
    given: dict[str, str], missing: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{missing}: is missing"):
        async with tls.following(TlsConfig(**given)):
            pass


async def test_nothing_set_is_plain_text() -> None:
    async with tls.following(TlsConfig()) as secure:
        assert secure is None


# gRPC


class Served(NamedTuple):
    secure: Tls
    target: str
    second: asyncio.Event


@pytest.fixture
async def served(files: Files) -> AsyncIterator[Served]:
    """A server under mutual TLS: Count streams two numbers, the second on request; Who names the caller."""
    secure = Tls(config(files))
    server = rpc.RpcServer.bind("127.0.0.1:0", [], tls=secure)
    second = asyncio.Event()

    async def count(_: bytes, __: Any) -> AsyncIterator[bytes]:
        yield b"1"
        await second.wait()
        yield b"2"

    async def who(_: bytes, context: Any) -> bytes:
        return bytes(context.auth_context()["x509_common_name"][0])

    handlers: dict[str, Any] = {
        "Count": grpc.unary_stream_rpc_method_handler(count),
        "Who": grpc.unary_unary_rpc_method_handler(who),
    }
    server.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
    await server.start()
    try:
        yield Served(secure, f"127.0.0.1:{server.port}", second)
    finally:
        await server.stop(0)


async def who(target: str, secure: Tls | None) -> bytes:
    async with rpc.channel(target, secure) as channel:
        return await asked(channel)


async def asked(channel: grpc.aio.Channel) -> bytes:
    method: Any = channel.unary_unary("/t.T/Who")
    return bytes(await method(b"", timeout=5))


def presented(target: str, authority: Authority, client: Files) -> x509.Certificate:
    """The certificate that a port shows."""
    context = ssl.create_default_context(cadata=authority.pem.decode())
    context.load_cert_chain(client.certificate, client.key)
    host, _, port = target.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=5) as raw,
        context.wrap_socket(raw, server_hostname=host) as secured,
    ):
        der = secured.getpeercert(binary_form=True)
        assert der is not None
        return x509.load_der_x509_certificate(der)


async def test_both_sides_know_each_other_under_mutual_tls(served: Served) -> None:
    secure, target, _ = served
    assert await who(target, secure) == b"first"


async def test_strangers_are_refused(served: Served, tmp_path: Path, authority: Authority) -> None:
    target = served.target
    other = Authority("another authority")
    own = Files(tmp_path / "own").write(authority.pair(), authority)
    trusts_other = Files(tmp_path / "trusts-other").write(authority.pair(), other)
    signed_by_other = Files(tmp_path / "signed-by-other").write(other.pair(), authority)
    strangers = {
        "plain text": None,
        "no certificate": Tls(TlsConfig(ca=str(own.ca))),
        "trusts another authority": Tls(config(trusts_other)),
        "signed by another authority": Tls(config(signed_by_other)),
        "expired": Tls(config(Files(tmp_path / "old").write(authority.pair(days=-1, age_days=9), authority))),
    }
    for name, secure in strangers.items():
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await who(target, secure)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE, name
    assert await who(target, Tls(config(own))) == b"service"


async def test_a_certificate_for_another_address_is_refused(served: Served) -> None:
    secure, target, _ = served
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await who(target.replace("127.0.0.1", "127.0.0.2"), secure)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_renewed_certificate_is_served_while_a_stream_of_the_old_one_goes_on(
    served: Served, files: Files, authority: Authority
) -> None:
    secure, target, second = served
    channels = Channels(secure)
    count: Any = channels.to(target).unary_stream("/t.T/Count")
    stream = count(b"", timeout=30)
    assert await stream.read() == b"1"
    renewed = authority.pair("second", days=60)
    files.write(renewed, authority)
    assert await who(target, secure) == b"first", "not looked yet"
    secure.look()
    shown = await asyncio.to_thread(presented, target, authority, files)
    assert shown == renewed.certificate
    # The same set of channels calls with the new one, and lets the old stream end by itself.
    assert await asked(channels.to(target)) == b"second"
    second.set()
    assert await stream.read() == b"2"
    assert await stream.read() is grpc.aio.EOF
    await channels.close()


async def test_another_authority_is_taken_too(
    served: Served, files: Files, authority: Authority, tmp_path: Path
) -> None:
    secure, target, _ = served
    new = Authority("the next authority")
    caller = Files(tmp_path / "caller").write(new.pair("new caller"), new)
    files.ca.write_bytes(authority.pem + new.pem)
    caller.ca.write_bytes(authority.pem + new.pem)
    with pytest.raises(grpc.aio.AioRpcError):
        await who(target, Tls(config(caller)))
    secure.look()
    assert await who(target, Tls(config(caller))) == b"new caller"


async def test_half_a_renewal_is_not_taken_and_said_only_when_it_lasts(
    served: Served, files: Files, authority: Authority
) -> None:
    secure, target, _ = served
    renewed = authority.pair("second")
    files.certificate.write_bytes(renewed.pem)
    with capture_logs() as logs:
        secure.look()
        assert logs == []
        secure.look()
        secure.look()
    assert [entry["event"] for entry in logs] == ["tls.renewal_not_taken"]
    assert str(files.key) in logs[0]["error"]
    assert await who(target, secure) == b"first"
    files.key.write_bytes(renewed.key_pem)
    secure.look()
    assert await who(target, secure) == b"second"


async def test_files_are_followed_by_themselves(
    files: Files, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "POLL_S", 0.01)
    async with tls.following(config(files)) as secure:
        assert secure is not None
        before = secure.generation
        files.write(authority.pair("second"), authority)
        await eventually(lambda: secure.generation > before)


async def test_a_failure_that_nobody_thought_of_does_not_end_the_following(
    files: Files, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "POLL_S", 0.01)
    told: list[int] = []

    def tell(renewed: Tls) -> None:
        told.append(renewed.generation)
        if len(told) == 1:
            raise RuntimeError("unforeseen")

    async with tls.following(config(files)) as secure:
        assert secure is not None
        secure.on_renewal(tell)
        files.write(authority.pair("second"), authority)
        await eventually(lambda: len(told) == 1)
        files.write(authority.pair("third"), authority)
        await eventually(lambda: len(told) == 2)


# HTTP


@pytest.mark.parametrize("mutual", [False, True])
async def test_http_shows_what_the_files_hold_now(files: Files, authority: Authority, mutual: bool) -> None:
    secure = Tls(ServerTlsConfig(str(files.certificate), str(files.key), str(files.ca) if mutual else ""), "http_tls")

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        assert request.transport is not None
        peer = request.transport.get_extra_info("peercert")
        return web.Response(text=str(peer["subject"][0][0][1]) if peer else "nobody")

    async def ask(own: Files | None) -> str:
        trusting = ssl.create_default_context(cadata=authority.pem.decode())
        if own is not None:
            trusting.load_cert_chain(own.certificate, own.key)
        async with ClientSession(connector=TCPConnector(ssl=trusting)) as http, http.get(url) as response:
            return await response.text()

    http_server = web.Server(answer)
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(http_server, "127.0.0.1", 0, ssl=secure.server_context())
    target = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    url = f"https://{target}/"
    try:
        assert await ask(files) == ("first" if mutual else "nobody")
        if mutual:
            with pytest.raises(ClientError):
                await ask(None)
        else:
            assert await ask(None) == "nobody"
        renewed = authority.pair("second")
        files.write(renewed, authority)
        if mutual:  # and the old authority is no more
            files.ca.write_bytes(Authority("the next authority").pem)
        secure.look()
        if mutual:
            with pytest.raises(ClientError):
                await ask(files)
        else:
            shown = await asyncio.to_thread(presented, target, authority, files)
            assert shown == renewed.certificate
    finally:
        listening.close()
        await http_server.shutdown(1)


def shake_hands(
    client: ssl.SSLContext, server: ssl.SSLContext, session: ssl.SSLSession | None = None
) -> ssl.SSLSession | None:
    """A handshake in memory and a byte after it, which brings tickets; returns the client's session."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(to_client, to_server, server_hostname="127.0.0.1", session=session)
    far = server.wrap_bio(to_server, to_client, server_side=True)
    for step in (near.do_handshake, far.do_handshake) * 3:
        with contextlib.suppress(ssl.SSLWantReadError):
            step()
    far.write(b"x")
    assert near.read(1) == b"x"
    return near.session


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_caller_of_an_authority_that_was_taken_away_cannot_resume_its_session(
    files: Files, authority: Authority, version: ssl.TLSVersion
) -> None:
    secure = Tls(ServerTlsConfig(str(files.certificate), str(files.key), str(files.ca)), "http_tls")
    server = secure.server_context()
    client = ssl.create_default_context(cadata=authority.pem.decode())
    client.maximum_version = version
    client.load_cert_chain(files.certificate, files.key)
    session = shake_hands(client, server)
    shake_hands(client, server, session)
    files.ca.write_bytes(Authority("the next authority").pem)
    secure.look()
    with pytest.raises(ssl.SSLError):
        shake_hands(client, server, session)


# Expiry


def expiry(setting: str) -> float | None:
    return REGISTRY.get_sample_value("stoker_tls_certificate_expiry_timestamp_seconds", {"setting": setting})


def warned(pair: Pair, files: Files, authority: Authority, *, left_s: list[float]) -> list[list[str]]:
    """What is said of a certificate at each of the times left."""
    files.write(pair, authority)
    clock = [0.0]
    secure: Tls | None = None
    said = []
    for left in left_s:
        clock[0] = pair.ends - left
        with capture_logs() as logs:
            if secure is None:
                secure = Tls(config(files), clock=lambda: clock[0])
            else:
                secure.look()
        told = [entry for entry in logs if entry["event"].startswith("tls.certificate_expire")]
        said.append([f"{entry['log_level']} {entry['setting']}" for entry in told])
    return said


def test_a_warning_comes_two_weeks_early_and_once_a_day(files: Files, authority: Authority) -> None:
    pair = authority.pair(days=60, age_days=30)
    told = warned(pair, files, authority, left_s=[14.1 * DAY_S, 13.9 * DAY_S, 13.8 * DAY_S, 12.9 * DAY_S, -1.0])
    warning = ["warning tls.certificate"]
    assert told == [[], warning, [], warning, ["error tls.certificate"]]
    assert expiry("tls.certificate") == pair.ends
    assert expiry("tls.ca") == authority.own.ends


def test_a_certificate_that_lives_for_a_day_is_warned_of_in_its_last_third(
    files: Files, authority: Authority
) -> None:
    pair = authority.pair(days=0.5, age_days=0.5)
    told = warned(pair, files, authority, left_s=[0.34 * DAY_S, 0.33 * DAY_S])
    assert told == [[], ["warning tls.certificate"]]


def test_an_old_authority_beside_a_new_one_is_no_alarm(files: Files, authority: Authority) -> None:
    old = Authority("old", days=-1)
    files.ca.write_bytes(old.pem + authority.pem)
    with capture_logs() as logs:
        Tls(config(files))
    assert {entry["event"] for entry in logs} == {"tls.taken"}
    assert expiry("tls.ca") == authority.own.ends


def test_no_key_is_shown_by_accident(files: Files) -> None:
    secure = Tls(config(files))
    assert b"PRIVATE KEY" in files.key.read_bytes()
    assert "PRIVATE KEY" not in repr(secure._material)
    assert "PRIVATE KEY" not in repr(EtcdTls(*secure.client_pem()))
