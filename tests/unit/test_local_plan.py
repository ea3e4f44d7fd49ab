"""What a local stack is made of."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import msgspec
import pytest

from stoker.cli.serving import router_settings
from stoker.common.config import ConfigError
from stoker.common.errors import InvalidRequest, StokerError
from stoker.local.deployment import LocalDeployment, has_bfloat16
from stoker.local.etcd import EtcdMember
from stoker.local.plan import StackSpec, make_plan
from stoker.local.ports import PortPicker
from stoker.local.state import Endpoints, Home, Plan, Probe, ServiceState, StackState


def picker() -> PortPicker:
    return PortPicker(random.Random(1))


def test_a_plan_has_every_service_and_survives_its_file(tmp_path: Path) -> None:
    home = Home(tmp_path)
    plan = make_plan(StackSpec(nodes=2, routers=2, fixed_ports=False), home, picker())
    names = [service.name for service in plan.services]
    assert names == ["etcd", "registry", "scaler", "planner", "node-1", "node-2", "router", "router-2"]
    home.write_plan(plan)
    assert home.read_plan() == plan


def test_services_start_after_what_they_need_and_stop_before_it(tmp_path: Path) -> None:
    plan = make_plan(StackSpec(fixed_ports=False), Home(tmp_path), picker())
    starts = {s.name: s.starts for s in plan.services}
    stops = {s.name: s.stops for s in plan.services}
    assert starts["etcd"] < starts["registry"] < min(starts["router"], starts["node-1"], starts["planner"])
    assert stops["router"] < stops["node-1"] < stops["registry"] < stops["etcd"]


def test_no_port_is_given_twice(tmp_path: Path) -> None:
    plan = make_plan(StackSpec(nodes=20, routers=4), Home(tmp_path), picker())
    e = plan.endpoints
    targets = [e.etcd, *e.registry, *e.router, *(u.removeprefix("http://") for u in e.http), *e.agents]
    assert len({*targets, e.scaler, e.planner}) == len(targets) + 2


def test_an_envoy_before_each_router_asks_it_and_outlives_it(tmp_path: Path) -> None:
    plan = make_plan(StackSpec(routers=2, data_plane="envoy"), Home(tmp_path), picker())
    services = {service.name: service for service in plan.services}
    assert len(plan.endpoints.envoy) == 2
    for number, (envoy, router) in enumerate((("envoy", "router"), ("envoy-2", "router-2"))):
        front, behind = services[envoy], services[router]
        assert front.probe == Probe("http", plan.endpoints.envoy[number].removeprefix("http://"))
        for setting in ("listen.grpc=", "listen.http=", "listen.ext_authz="):
            told = [each for each in front.argv if each.startswith(setting)]
            assert len(told) == 1
            assert told[0] in behind.argv
        assert front.starts > behind.starts
        assert front.stops > behind.stops, "it carries what the router waits for"
    bare = make_plan(StackSpec(routers=2), Home(tmp_path), picker())
    assert not bare.endpoints.envoy
    assert not any("ext_authz" in " ".join(service.argv) for service in bare.services)


def test_settings_of_routers_reach_each_of_them_and_nobody_else(tmp_path: Path) -> None:
    spec = StackSpec(routers=2, router_settings=("routing.hold_s=0",))
    plan = make_plan(spec, Home(tmp_path), picker())
    told = [service.name for service in plan.services if "routing.hold_s=0" in service.argv]
    assert told == ["router", "router-2"]
    assert router_settings(["routing.hold_s=0"]) == ("routing.hold_s=0",)
    with pytest.raises(ConfigError, match="no such setting"):
        router_settings(["routing.hold=0"])


def test_everything_listens_on_the_loopback(tmp_path: Path) -> None:
    plan = make_plan(StackSpec(data_plane="envoy"), Home(tmp_path), picker())
    for service in plan.services:
        assert service.probe.target.startswith("127.0.0.1:")
        assert "0.0.0.0" not in " ".join(service.argv)


def test_a_taken_port_is_left_alone() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        assert picker().pick(taken) != taken


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "example.org", "::"])
def test_the_development_etcd_stays_on_the_loopback(host: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no loopback address"):
        EtcdMember(tmp_path, 1, 2, host=host)


@pytest.mark.parametrize("wrong", [{"nodes": 0}, {"routers": 17}, {"slots": 65}])
def test_absurd_sizes_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest, match="on one machine"):
        StackSpec(**wrong)  # type: ignore[arg-type]


def test_an_unreadable_state_says_what_to_do(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.state_file.write_text('{"engine": 3')
    with pytest.raises(StokerError, match="stoker down"):
        home.read_state()


def test_a_state_survives_its_file_and_knows_whether_it_runs(tmp_path: Path) -> None:
    home = Home(tmp_path)
    endpoints = Endpoints("e", ("r",), ("o",), ("h",), ("a",), "s", "p")
    state = StackState("sim", endpoints, [ServiceState("etcd", "ready", None, 2, "x.log")])
    home.write_state(state)
    assert home.read_state() == state
    assert not state.running
    assert msgspec.json.decode(home.state_file.read_bytes())["phase"] == "starting"
    assert isinstance(make_plan(StackSpec(fixed_ports=False), home, picker()), Plan)


def test_a_named_model_names_its_deployment() -> None:
    assert LocalDeployment("vllm", model="Qwen/Qwen2.5-0.5B-Instruct").name == "qwen2-5-0-5b-instruct"
    assert LocalDeployment("vllm", model="/models/llama/").name == "llama"
    assert LocalDeployment("sim").name == "tiny"


def test_pressure_bounds_the_cache_of_a_replica() -> None:
    spec = LocalDeployment("vllm", model="/m/x", pressure=True).spec()
    args = list(spec.engine_args)
    assert args[args.index("--num-gpu-blocks-override") + 1] == "300"
    assert args[args.index("--block-size") + 1] == "32"
    assert "--num-gpu-blocks-override" not in LocalDeployment("vllm", model="/m/x").spec().engine_args


@pytest.mark.parametrize(
    ("cpuinfo", "has"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx avx2 f16c\n", False),
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd\n", False),
        ("nothing that tells\n", True),
        (None, True),
    ],
)
def test_the_tiny_model_is_not_computed_in_numbers_that_the_cpu_lacks(
    cpuinfo: str | None, has: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        file.write_text(cpuinfo)
    assert has_bfloat16(file) == has
    monkeypatch.setattr("stoker.local.deployment.has_bfloat16", lambda: has)
    args = LocalDeployment("vllm").spec(tmp_path / "model").engine_args
    assert ("float32" in args) != has
    assert "float32" not in LocalDeployment("vllm", on_gpu=True).spec(tmp_path / "model").engine_args
    assert "float32" not in LocalDeployment("vllm", model="/m/x").spec().engine_args
