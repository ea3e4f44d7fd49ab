"""From a task to the launch of its engine."""

from __future__ import annotations

import sys
from pathlib import Path

from stoker.common.errors import InvalidRequest, StokerError
from stoker.node_agent.config import AgentConfig
from stoker.node_agent.core.task import Task, parallelism
from stoker.node_agent.engine.protocol import Engine, Gang, LaunchRequest
from stoker.node_agent.engine.sim import SimEngine
from stoker.node_agent.engine.vllm import VllmEngine
from stoker.node_agent.ports import Ports, can_be_bound
from stoker.node_agent.state_files import Address


def engine_of(task: Task, config: AgentConfig) -> Engine:
    """The kind of engine a task asks for. Raises StokerError when this host may not launch it."""
    if task.engine not in config.engines:
        allowed = ", ".join(config.engines) or "none"
        raise StokerError(
            f"engine {task.engine!r} is not among those of this host ({allowed}); see its setting `engines`",
            reason="ENGINE_NOT_ALLOWED",
        )
    python = config.python or sys.executable
    return VllmEngine(python) if task.engine == "vllm" else SimEngine(python)


def bind_host(config: AgentConfig) -> str:
    """The address that engines' HTTP servers bind."""
    return config.engine_host or config.listen.rpartition(":")[0].strip("[]") or "0.0.0.0"  # noqa: S104


def take_address(task: Task, config: AgentConfig, ports: Ports) -> Address:
    """Free ports for a new engine."""
    _, data = parallelism(task)
    return Address(bind_host(config), ports.take(), ports.take(data), ports.take(data))


def keep_address(task: Task, address: Address, ports: Ports) -> None:
    """Mark the ports of an adopted engine as taken."""
    _, data = parallelism(task)
    for port, count in ((address.http, 1), (address.kv_events, data), (address.kv_replay, data)):
        ports.keep(port, count)


def free_address(task: Task, address: Address, ports: Ports) -> None:
    """The engine is gone: its ports may be handed out again."""
    _, data = parallelism(task)
    for port, count in ((address.http, 1), (address.kv_events, data), (address.kv_replay, data)):
        ports.give_back(port, count)


def request_of(task: Task, address: Address, log_path: Path) -> LaunchRequest:
    """Everything the engine is told.

    Raises InvalidRequest when the gang's meeting place is not known, StokerError when its port is taken.
    """
    tensor, data = parallelism(task)
    gang = None
    if task.size > 1:
        if not task.head_host or not task.rendezvous_port:
            raise InvalidRequest.field(
                "rendezvous_port",
                f"the gang of {task.replica_id} has no meeting place: host or port of rank 0 missing",
            )
        if task.rank == 0 and not can_be_bound(task.rendezvous_port):
            raise StokerError(
                f"port {task.rendezvous_port}, at which the gang of {task.replica_id} meets, is held by another "
                f"process on this host; see `ss -ltnp sport = :{task.rendezvous_port}`",
                reason="RENDEZVOUS_PORT_TAKEN",
            )
        gang = Gang(task.rank, task.size, task.head_host, task.rendezvous_port)
    loras = tuple(f"{name}={path}" for name, path in task.lora_adapters)
    return LaunchRequest(
        model=task.model,
        served_model_name=task.served_model_name,
        http_port=address.http,
        kv_events_port=address.kv_events,
        kv_replay_port=address.kv_replay,
        log_path=log_path,
        host=address.host,
        engine_args=(*(("--enable-lora", "--lora-modules", *loras) if loras else ()), *task.engine_args),
        env=task.env,
        tensor_parallel=tensor,
        data_parallel=data,
        max_output_tokens=task.max_output_tokens,
        gpu_indices=task.gpu_indices,
        gang=gang,
    )
