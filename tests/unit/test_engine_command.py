"""The command lines of both engines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from stoker.common.errors import InvalidRequest
from stoker.node_agent.engine import ENGINES
from stoker.node_agent.engine.protocol import Engine, Gang, LaunchCommand, LaunchRequest

REQUEST = LaunchRequest(
    model="/models/tiny",
    served_model_name="tiny",
    http_port=8000,
    kv_events_port=8100,
    kv_replay_port=8200,
    log_path=Path("/var/log/engine.log"),
    engine_args=("--max-model-len", "1024"),
)
VLLM, SIM = ENGINES["vllm"], ENGINES["sim"]


def value(command: LaunchCommand, flag: str) -> str:
    return command.argv[command.argv.index(flag) + 1]


@pytest.mark.parametrize("engine", [VLLM, SIM], ids=["vllm", "sim"])
def test_an_engine_is_told_where_to_serve_and_to_publish(engine: Engine) -> None:
    assert isinstance(engine, Engine)
    command = engine.command(REQUEST)
    assert value(command, "--model") == "/models/tiny"
    assert (value(command, "--host"), value(command, "--port")) == ("127.0.0.1", "8000")
    assert "--enable-prefix-caching" in command.argv
    events = json.loads(value(command, "--kv-events-config"))
    (endpoint,) = engine.kv_endpoints(REQUEST)
    assert (events["endpoint"], events["replay_endpoint"]) == (endpoint.events, endpoint.replay)
    assert events["endpoint"] == "tcp://127.0.0.1:8100"
    assert command.argv[-2:] == ("--max-model-len", "1024")


@pytest.mark.parametrize("engine", [VLLM, SIM], ids=["vllm", "sim"])
def test_the_engine_itself_bounds_the_output_of_each_request(engine: Engine) -> None:
    command = engine.command(replace(REQUEST, max_output_tokens=64))
    assert json.loads(value(command, "--override-generation-config")) == {"max_new_tokens": 64}
    assert "--override-generation-config" not in engine.command(REQUEST).argv


@pytest.mark.parametrize("engine", [VLLM, SIM], ids=["vllm", "sim"])
def test_gang_members_other_than_the_head_are_headless(engine: Engine) -> None:
    head = replace(REQUEST, gang=Gang(0, 2, "10.0.0.1", 29501), tensor_parallel=2)
    member = replace(head, gang=Gang(1, 2, "10.0.0.1", 29501))
    assert "--headless" not in engine.command(head).argv
    argv = engine.command(member).argv
    assert "--headless" in argv
    assert "--port" not in argv
    assert engine.kv_endpoints(member) == ()
    for request, rank in ((head, "0"), (member, "1")):
        command = engine.command(request)
        assert (value(command, "--nnodes"), value(command, "--node-rank")) == ("2", rank)
        assert (value(command, "--master-addr"), value(command, "--master-port")) == ("10.0.0.1", "29501")


def test_vllm_without_gpus_runs_on_one_cpu_thread() -> None:
    command = VLLM.command(REQUEST)
    assert value(command, "--block-size") == "32"
    assert command.env["OMP_NUM_THREADS"] == "1"
    assert command.env["HF_HUB_OFFLINE"] == "1"


def test_vllm_on_the_cpu_is_one_process_unless_it_needs_more() -> None:
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    assert VLLM.command(REQUEST).env[name] == "0"
    assert name not in VLLM.command(replace(REQUEST, tensor_parallel=2)).env
    assert name not in VLLM.command(replace(REQUEST, data_parallel=2)).env
    assert name not in VLLM.command(replace(REQUEST, gpu_indices=(0,))).env


def test_vllm_with_gpus_sees_only_its_own() -> None:
    command = VLLM.command(replace(REQUEST, gpu_indices=(2, 3), tensor_parallel=2, model="org/model"))
    assert command.env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert value(command, "--tensor-parallel-size") == "2"
    assert "--block-size" not in command.argv
    assert "VLLM_CPU_KVCACHE_SPACE" not in command.env


def test_the_environment_is_the_agents_less_what_is_stokers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_TOKEN", "secret")
    monkeypatch.setenv("PLAIN", "kept")
    env = VLLM.command(replace(REQUEST, env={"OMP_NUM_THREADS": "4"})).env
    assert "STOKER_TOKEN" not in env
    assert (env["PLAIN"], env["OMP_NUM_THREADS"]) == ("kept", "4")


def test_data_parallel_ranks_publish_on_consecutive_ports() -> None:
    endpoints = VLLM.kv_endpoints(replace(REQUEST, data_parallel=3))
    assert [endpoint.dp_rank for endpoint in endpoints] == [0, 1, 2]
    assert endpoints[2].events == "tcp://127.0.0.1:8102"
    assert endpoints[2].replay == "tcp://127.0.0.1:8202"


@pytest.mark.parametrize("host", ["0.0.0.0", ""])
def test_a_wildcard_is_reached_by_the_loopback(host: str) -> None:
    assert replace(REQUEST, host=host).base_url == "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (replace(REQUEST, model=""), "model"),
        (replace(REQUEST, served_model_name=""), "served_model_name"),
        (replace(REQUEST, http_port=0), "http_port"),
        (replace(REQUEST, kv_events_port=65535, data_parallel=2), "kv_events_port"),
        (replace(REQUEST, tensor_parallel=0), "tensor_parallel"),
        (replace(REQUEST, gang=Gang(2, 2, "10.0.0.1", 1)), "gang.rank"),
    ],
)
@pytest.mark.parametrize("engine", [VLLM, SIM], ids=["vllm", "sim"])
def test_what_can_never_start_is_refused_by_field(engine: Engine, request_: LaunchRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        engine.command(request_)
    assert caught.value.fields[0].field == field
