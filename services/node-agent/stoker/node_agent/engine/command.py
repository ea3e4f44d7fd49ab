"""What both kinds of engine share in their command lines."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from stoker.common.errors import InvalidRequest
from stoker.node_agent.engine.protocol import KvEndpoint, LaunchRequest

REPLAY_STEPS = 50_000
"""Engine steps kept for replay, at some KB each: minutes of an agent's absence under full load."""


def check(request: LaunchRequest) -> None:
    """Refuse what no engine can start, naming the field."""
    for name, value in (("tensor_parallel", request.tensor_parallel), ("data_parallel", request.data_parallel)):
        if value < 1:
            raise InvalidRequest.field(name, f"must be at least 1, is {value}")
    for name, port in (
        ("http_port", request.http_port),
        ("kv_events_port", request.kv_events_port + request.data_parallel - 1),
        ("kv_replay_port", request.kv_replay_port + request.data_parallel - 1),
    ):
        if not 0 < port < 65536:
            raise InvalidRequest.field(name, f"must be a port from 1 to 65535, is {port}")
    if not request.model:
        raise InvalidRequest.field("model", "must name a model directory or a hub id")
    if not request.served_model_name:
        raise InvalidRequest.field("served_model_name", "must not be empty")
    gang = request.gang
    if gang is not None and not 0 <= gang.rank < gang.size:
        raise InvalidRequest.field("gang.rank", f"must be from 0 to {gang.size - 1}, is {gang.rank}")


def serving_args(request: LaunchRequest) -> list[str]:
    """Model, address and KV events: what the head of a replica is told."""
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://127.0.0.1:{request.kv_events_port}",
        "replay_endpoint": f"tcp://127.0.0.1:{request.kv_replay_port}",
        "buffer_steps": REPLAY_STEPS,
    }
    most = request.max_output_tokens
    return [
        *("--served-model-name", request.served_model_name),
        *("--host", request.host),
        *("--port", str(request.http_port)),
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
        *("--kv-events-config", json.dumps(events)),
        # The engine clamps: a request that asks for no bound gets this one, also over its own HTTP server.
        *(("--override-generation-config", json.dumps({"max_new_tokens": most})) if most else ()),
    ]


def gang_args(request: LaunchRequest) -> list[str]:
    """One member's place in its gang; members that are not the head serve nothing."""
    gang = request.gang
    if gang is None or gang.size == 1:
        return []
    args = [
        *("--nnodes", str(gang.size)),
        *("--node-rank", str(gang.rank)),
        *("--master-addr", gang.master_addr),
        *("--master-port", str(gang.master_port)),
    ]
    return args if gang.is_head else [*args, "--headless"]


def kv_endpoints(request: LaunchRequest) -> tuple[KvEndpoint, ...]:
    """Where the events that `serving_args` asks for can be had."""
    if request.gang is not None and not request.gang.is_head:
        return ()
    return tuple(
        KvEndpoint(
            events=f"tcp://127.0.0.1:{request.kv_events_port + rank}",
            replay=f"tcp://127.0.0.1:{request.kv_replay_port + rank}",
            dp_rank=rank,
        )
        for rank in range(request.data_parallel)
    )


def child_env(defaults: Mapping[str, str], request: LaunchRequest) -> dict[str, str]:
    """The agent's own environment without what is Stoker's, then the defaults, then the request's."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("STOKER_")}
    return {**inherited, **defaults, **request.env}
