"""What `stoker doctor` says of certificates, in files and on real ports."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.cli import doctor, doctor_tls
from stoker.cli.addresses import Addresses, secured
from stoker.common import rpc
from stoker.common.tls import Tls, TlsConfig
from tests.support.certificates import Authority, Files


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def files(tmp_path: Path, authority: Authority) -> Files:
    return Files(tmp_path / "tls").write(authority.pair(days=60), authority)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STOKER_TLS_CA", "STOKER_TLS_CERTIFICATE", "STOKER_TLS_KEY"):
        monkeypatch.delenv(name, raising=False)


def write_settings(folder: Path, files: Files) -> Path:
    folder.mkdir()
    (folder / "registry.yaml").write_text(
        f"listen: 127.0.0.1:7310\ntls: {{certificate: {files.certificate}, key: {files.key}, ca: {files.ca}}}\n"
    )
    (folder / "router.yaml").write_text(f"http_tls: {{certificate: {files.certificate}, key: {files.key}}}\n")
    return folder


def test_nothing_set_is_fine_and_said(tmp_path: Path) -> None:
    status, detail, fix = doctor_tls.certificates(tmp_path / "absent")
    assert (status, fix) == ("ok", "")
    assert "plain text" in detail


def test_every_service_of_the_host_is_looked_at(tmp_path: Path, files: Files) -> None:
    settings = write_settings(tmp_path / "etc", files)
    status, detail, _ = doctor_tls.certificates(settings)
    assert status == "ok"
    assert f"{settings / 'registry.yaml'}: tls.ca ({files.ca})" in detail
    assert f"{settings / 'router.yaml'}: http_tls.certificate ({files.certificate})" in detail


def test_one_that_ends_soon_is_a_warning(tmp_path: Path, files: Files, authority: Authority) -> None:
    settings = write_settings(tmp_path / "etc", files)
    files.write(authority.pair(days=10, age_days=50), authority)
    status, detail, fix = doctor_tls.certificates(settings)
    assert status == "warn"
    assert "registry.yaml: tls.certificate" in detail
    assert "tls.ca" not in detail, "that one is good for long"
    assert "without a restart" in fix


@pytest.mark.parametrize("broken", ["key", "setting", "yaml"])
def test_what_cannot_be_used_fails_with_service_setting_and_file(tmp_path: Path, files: Files, broken: str) -> None:
    settings = write_settings(tmp_path / "etc", files)
    said = {"key": str(files.key), "setting": "tls", "yaml": "cannot be read"}[broken]
    if broken == "key":
        files.key.write_bytes(Authority().pair().key_pem)
    elif broken == "setting":
        (settings / "registry.yaml").write_text("tls: {certificate: [1]}\n")
    else:
        (settings / "registry.yaml").write_text("tls: {\n")
    status, detail, _ = doctor_tls.certificates(settings)
    assert status == "fail"
    assert str(settings / "registry.yaml") in detail
    assert said in detail


def test_the_environment_counts_for_named_addresses_alone(
    files: Files, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in files.environment().items():
        monkeypatch.setenv(name, value)
    assert secured("") is None
    assert secured("10.0.0.11:7310") is not None
    status, detail, _ = doctor_tls.certificates(tmp_path)
    assert status == "ok"
    assert detail.startswith("environment: STOKER_TLS_CERTIFICATE")


async def test_services_over_tls_are_asked_and_what_is_wrong_is_said(files: Files, tmp_path: Path) -> None:
    secure = Tls(TlsConfig(str(files.certificate), str(files.key), str(files.ca), str(files.ca)))
    server = rpc.RpcServer.bind("127.0.0.1:0", [], tls=secure)
    await server.start()
    await server.set_serving(True)
    other = Authority("another")
    stranger = Files(tmp_path / "stranger").write(other.pair(), other)
    addresses = Addresses((f"127.0.0.1:{server.port}",), ())
    (good,) = await doctor.reachable(addresses, secure)
    (plain,) = await doctor.reachable(addresses)
    (wrong,) = await doctor.reachable(
        addresses, Tls(TlsConfig(str(stranger.certificate), str(stranger.key), ca=str(stranger.ca)))
    )
    assert (good.status, good.detail) == ("ok", "serving over TLS")
    assert (plain.status, plain.detail) == ("fail", "it speaks TLS")
    assert "STOKER_TLS_CA" in plain.fix
    assert wrong.status == "fail"
    assert "unable to get local issuer" in wrong.detail or "self-signed" in wrong.detail
    await server.stop(0)
