"""A request through a fleet whose every connection of Stoker's own is under mutual TLS, etcd's included."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from stoker.api.inference.v1 import inference_pb2, inference_pb2_grpc
from stoker.client import AsyncClient, ClientSettings
from stoker.common import rpc, tls
from stoker.common.config import load
from stoker.common.errors import Unavailable
from stoker.common.tls import ServerTlsConfig, Tls, TlsConfig
from stoker.registry.client import RegistryClient
from stoker.router.app import RouterApp
from stoker.router.config import RouterConfig
from stoker.router.workers.siblings import Siblings
from tests.support.agents import BIN, Agent, Registry, Service, until
from tests.support.certificates import Authority, Files
from tests.support.etcd import EtcdServer
from tests.support.fleet import SPEC_ARGS, all_ready, assign
from tests.support.router import QUICK

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Secured:
    """What runs."""

    authority: Authority
    files: Files
    secure: Tls
    registry: Registry
    agent: Agent
    router: RouterApp

    @property
    def grpc_target(self) -> str:
        return f"127.0.0.1:{self.router.rpc.port}"


@contextlib.contextmanager
def etcd_under_tls(folder: Path, files: Files) -> Iterator[EtcdServer]:
    shown = ("--cert-file", str(files.certificate), "--key-file", str(files.key))
    server = EtcdServer(
        folder, extra=[*shown, "--client-cert-auth", "--trusted-ca-file", str(files.ca), "--log-level", "error"]
    )
    server.scheme = "https"
    server.start(wait=False)
    try:
        yield server
    finally:
        server.kill()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    authority = Authority()
    files = Files(folder / "tls").write(authority.pair(), authority)
    secure = Tls(TlsConfig(str(files.certificate), str(files.key), str(files.ca), str(files.ca)))
    with etcd_under_tls(folder, files) as etcd, contextlib.ExitStack() as held:
        to_etcd = [f"etcd.ca={files.ca}", f"etcd.certificate={files.certificate}", f"etcd.key={files.key}"]
        registry = Registry(folder, etcd.endpoint, *to_etcd, *files.settings())
        registry.start()
        held.callback(registry.kill)
        agent = held.enter_context(Agent(folder, "node-a", [registry.endpoint], *files.settings()).running())
        async with RegistryClient([registry.endpoint], tls=secure) as client:

            async def node_known() -> bool:
                return any(node.node_id == "node-a" for node in (await client.get_fleet()).records.nodes)

            await until("the agent is known", node_known, within_s=60)
            await assign(client, ["node-a"], 2, [*SPEC_ARGS, "--sim-speed", "20"])
        settings = [f"listen.{port}=127.0.0.1:0" for port in ("grpc", "http", "pick")]
        settings += [*QUICK, *files.settings()]
        config = load(RouterConfig, None, [*settings, f"registries=[{registry.endpoint}]"])
        http = Tls(ServerTlsConfig(str(files.certificate), str(files.key)), "http_tls")
        router = RouterApp(config, Siblings.alone(), secure, http)
        await router.start()
        try:
            await router.watch()
            await until("all replicas ready and alike", lambda: all_ready(router, 2), within_s=60)
            yield Secured(authority, files, secure, registry, agent, router)
        finally:
            await router.close()


async def test_grpc_from_client_to_engine(fleet: Secured) -> None:
    request = inference_pb2.GenerateRequest(
        model="tiny", text="The boiler wants coal.", sampling=inference_pb2.Sampling(max_tokens=4, ignore_eos=True)
    )
    async with rpc.channel(fleet.grpc_target, fleet.secure) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        responses = [response async for response in stub.Generate(request, timeout=20)]
    assert responses[0].started.replica_id.startswith("tiny-")
    assert responses[-1].finished.usage.completion_tokens == 4


async def test_a_client_that_picks_by_http_shows_its_certificate(fleet: Secured) -> None:
    assert fleet.router.pick_http is not None
    routers = [f"https://127.0.0.1:{fleet.router.pick_http.number}"]
    async with AsyncClient(routers, ClientSettings(tls=fleet.secure)) as client:
        answer = await client.generate("tiny", "The boiler wants coal.", max_tokens=4, ignore_eos=True)
        assert (answer.usage.completion_tokens, answer.served.relayed) == (4, False)
    for stranger in (None, Tls(TlsConfig(ca=str(fleet.files.ca)))):
        async with AsyncClient(routers, ClientSettings(tls=stranger)) as client:
            with pytest.raises(Unavailable):
                await client.generate("tiny", "x", max_tokens=1)


async def test_openai_http_asks_clients_for_no_certificate(fleet: Secured) -> None:
    trusting = ssl.create_default_context(cadata=fleet.authority.pem.decode())
    url = f"https://127.0.0.1:{fleet.router.http_port}/v1/completions"
    body = {"model": "tiny", "prompt": "The boiler wants coal.", "max_tokens": 3}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting)) as http:
        async with http.post(url, json=body) as response:
            assert response.status == 200, await response.text()
            assert (await response.json())["usage"]["completion_tokens"] == 3
        with pytest.raises(aiohttp.ClientError):
            await http.post(url.replace("https", "http"), json=body)


async def test_no_port_serves_those_without_a_certificate(fleet: Secured) -> None:
    bare = Tls(TlsConfig(ca=str(fleet.files.ca)))
    for target in (fleet.registry.endpoint, fleet.agent.endpoint, fleet.grpc_target):
        assert await rpc.wait_serving(target, 5, fleet.secure)
        for stranger in (None, bare):
            assert not await rpc.wait_serving(target, 0.5, stranger)


async def test_dispatches_are_announced_over_tls(fleet: Secured) -> None:
    await until("the router announces", lambda: fleet.router._announcing._announcer.connected.is_set())  # type: ignore[union-attr]


async def test_every_process_takes_what_was_renewed(fleet: Secured) -> None:
    renewed = fleet.authority.pair("renewed", days=90)
    fleet.files.write(renewed, fleet.authority)
    context = ssl.create_default_context(cadata=fleet.authority.pem.decode())
    context.load_cert_chain(fleet.files.certificate, fleet.files.key)

    async def show_renewed() -> bool:
        shown = [await shown_by(endpoint, context) for endpoint in (fleet.registry.endpoint, fleet.agent.endpoint)]
        return shown == [renewed.pem, renewed.pem]

    await until("registry and agent show the renewed certificate", show_renewed, within_s=tls.POLL_S + 10)
    fleet.secure.look()
    await test_grpc_from_client_to_engine(fleet)
    await until("the registry calls etcd with it", lambda: taken(fleet.registry, "etcd.certificate") == 2)
    async with RegistryClient([fleet.registry.endpoint], tls=fleet.secure) as client:
        assert (await client.drain_node("node-a")) == ("tiny-0", "tiny-1")
        await client.drain_node("node-a", undo=True)


def taken(service: Service, setting: str) -> int:
    """How often a service took what the files of a setting held."""
    said = [json.loads(line) for line in service.log.read_text().splitlines() if line.startswith("{")]
    return sum(entry["event"] == "tls.taken" and entry["setting"] == setting for entry in said)


async def shown_by(endpoint: str, context: ssl.SSLContext) -> bytes:
    host, _, port = endpoint.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return ssl.DER_cert_to_PEM_cert(shown).encode()


def ended(command: list[str], environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **(environment or {})}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=False)


async def test_the_command_line_and_health_checks_show_a_certificate(fleet: Secured, tmp_path: Path) -> None:
    known = {**fleet.files.environment(), "STOKER_HOME": str(tmp_path)}
    stoker = str(BIN / "stoker")
    status = [stoker, "status", "--registry", fleet.registry.endpoint, "-o", "json"]
    explain = [stoker, "explain", "The boiler wants coal.", "--router", fleet.grpc_target, "-o", "json"]
    logs = [stoker, "logs", "tiny-0", "--registry", fleet.registry.endpoint, "-o", "json"]
    health = [sys.executable, "-m", "stoker.common.health", fleet.agent.endpoint]
    for command in (status, explain, logs, health):
        done = await asyncio.to_thread(ended, command, known)
        assert done.returncode == 0, (command, done.stderr)
    for command, refused in ((status, 3), (health, 1)):
        assert (await asyncio.to_thread(ended, command)).returncode == refused
    absent = {**known, "STOKER_TLS_KEY": str(tmp_path / "absent.pem")}
    for command, wrong in ((status, 1), (health, 2)):
        done = await asyncio.to_thread(ended, command, absent)
        assert done.returncode == wrong
        assert f"STOKER_TLS_KEY: cannot read {tmp_path / 'absent.pem'}" in done.stderr


async def test_what_cannot_be_used_ends_the_process_with_its_name(fleet: Secured, tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    key.write_bytes(Authority().pair().key_pem)
    settings = [*fleet.files.settings(), f"tls.key={key}", "listen=127.0.0.1:0"]
    arguments = [part for setting in settings for part in ("--set", setting)]
    for service in ("registry", "scaler", "planner", "node-agent"):
        more = ["--set", f"state_dir={tmp_path / 'state'}"] if service == "node-agent" else []
        command = [str(BIN / f"stoker-{service}"), *arguments, *more]
        done = await asyncio.to_thread(ended, command)
        last = json.loads(done.stderr.splitlines()[-1])
        assert (done.returncode, last["reason"]) == (1, "BAD_CERTIFICATE"), done.stderr
        assert f"tls.key: {key} is not the key of {fleet.files.certificate}" in last["error"]
