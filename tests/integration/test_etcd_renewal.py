"""Certificates of an etcd client that are renewed under its watches and leases."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stoker.etcd import Delta, EtcdClient, Snapshot, Tls, Watch, WatchTimes, transport
from tests.support.certificates import Authority, Files
from tests.support.etcd import EtcdServer
from tests.support.waiting import eventually


def secured(folder: Path, files: Files) -> EtcdServer:
    """An etcd that admits who shows a certificate of the authorities in `files`."""
    shown = ("--cert-file", str(files.certificate), "--key-file", str(files.key))
    server = EtcdServer(folder, extra=[*shown, "--client-cert-auth", "--trusted-ca-file", str(files.ca)])
    server.scheme = "https"
    return server


def tls_of(files: Files) -> Tls:
    return Tls.from_files(files.ca, files.certificate, files.key)


async def values(watch: Watch, key: str, value: bytes) -> None:
    """Read on until a key has a value; a snapshot comes first and never again."""
    async for item in watch:
        assert isinstance(item, Delta), "nothing is told twice"
        if any((kv.key, kv.value) == (key, value) for kv in item.puts):
            return


async def test_watch_and_lease_go_on_with_a_certificate_of_another_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_CALLS_END_S", 0.1)
    old, new = Authority("old"), Authority("new")
    server_files = Files(tmp_path / "server").write(old.pair(), old)
    before = Files(tmp_path / "before").write(old.pair(), old)
    after = Files(tmp_path / "after").write(new.pair(), new)
    for files in (server_files, after):
        files.ca.write_bytes(old.pem + new.pem)
    server = secured(tmp_path, server_files)
    server.start(wait=False)
    times = WatchTimes(progress_s=0.1, silence_s=5.0)
    try:
        async with (
            EtcdClient([server.endpoint], tls=tls_of(before), call_timeout_s=10, watch_times=times) as client,
            client.watch_prefix("/r/") as watch,
        ):
            assert isinstance(await anext(watch), Snapshot)
            lease = await client.lease(60)
            await client.put("/r/a", b"1", lease=lease.id)
            async with asyncio.timeout(60):
                await values(watch, "/r/a", b"1")
                assert await client.keep_alive_once(lease.id) == 60  # over a stream, which must move too
                client.renew(tls_of(after))
                assert await client.keep_alive_once(lease.id) == 60
                # The old connection is left as soon as nothing uses it.
                await eventually(lambda: not client._transport._closing)
                await client.put("/r/a", b"2")
                await values(watch, "/r/a", b"2")
                # The proof: an etcd that neither shows nor admits anything of the old authority.
                server.kill()
                server_files.write(new.pair(), new)
                server.start(wait=False)
                await client.put("/r/a", b"3", timeout=15)
                await values(watch, "/r/a", b"3")
            assert await client.keep_alive_once(lease.id) == 60
            assert lease.alive()
    finally:
        server.kill()
