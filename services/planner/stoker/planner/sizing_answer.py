"""How many GPUs a model needs: messages in, messages out, the core's sizing between them."""

from __future__ import annotations

import json

from stoker.api.common.v1 import common_pb2
from stoker.api.planner.v1 import planner_pb2
from stoker.common.errors import InvalidRequest
from stoker.planner import catalogue, machines, model_config
from stoker.planner.computing import Task
from stoker.planner.core.sizing import search
from stoker.planner.core.sizing.workload import Role, Slo, Workload

_MOST_CONFIG_BYTES = 1024 * 1024
_MOST_TYPES = 16
_MOST_REFUSED = 50
_MOST_GPUS = 1_024
_GPUS = 16
_ROLES = {Role.BOTH: common_pb2.ROLE_BOTH, Role.PREFILL: common_pb2.ROLE_PREFILL, Role.DECODE: common_pb2.ROLE_DECODE}
_RANGES = {
    "input_tokens": (1, 1e7),
    "output_tokens": (1, 1e7),
    "requests_per_s": (1e-6, 1e6),
    "ttft_s": (0, 3_600),
    "itl_s": (0, 60),
    "attainment": (0.5, 0.9999),
    "cached_share": (0, 0.999),
    "most_gpus": (0, _MOST_GPUS),
}


def size(request: planner_pb2.SizeRequest, task: Task) -> planner_pb2.SizeResponse:
    """The best way to serve. Raises InvalidRequest and BAD_MODEL_CONFIG, naming what is wrong."""
    slo = Slo(request.ttft_s or 1.0, request.itl_s or None, request.attainment or 0.95)
    asked = {**{field: getattr(request, field) for field in _RANGES}, "attainment": slo.attainment}
    for field, (least, most) in _RANGES.items():
        if not least <= asked[field] <= most:  # nor is NaN
            raise InvalidRequest.field(field, f"{asked[field]:g} is not in {least:g} to {most:g}")
    if not 1 <= len(request.gpus) <= _MOST_TYPES:
        raise InvalidRequest.field("gpus", f"names {len(request.gpus)} types; give 1 to {_MOST_TYPES}")
    model = model_config.parse(_config(request.model_config), name="model", source="model_config")
    known = catalogue.load()
    answer = search.Sizing(
        model,
        tuple(machines.machine_of(known, name, "gpus") for name in dict.fromkeys(request.gpus)),
        Workload(request.requests_per_s, request.input_tokens, request.output_tokens, hit_rate=request.cached_share),
        slo,
        search.Limits(request.most_gpus or _GPUS),
    ).answer(task.look)
    refused = [
        f"{each.machine.name} {each.layout.name}: {each.refused}" for each in answer.candidates if each.refused
    ]
    pools = answer.best.pools if answer.best is not None else ()
    return planner_pb2.SizeResponse(
        pools=[_pool(pool) for pool in pools],
        gpus=sum(pool.gpus for pool in pools),
        kv_bytes_per_token=model.kv_bytes_per_token,
        refused=refused[:_MOST_REFUSED],
    )


def _config(raw: bytes) -> dict[str, object]:
    if len(raw) > _MOST_CONFIG_BYTES:
        raise InvalidRequest.field("model_config", f"has {len(raw)} bytes; at most {_MOST_CONFIG_BYTES}")
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest.field("model_config", f"is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise InvalidRequest.field("model_config", "is no JSON object; give the model's config.json")
    return config


def _pool(pool: search.Pool) -> planner_pb2.SizedPool:
    layout = pool.layout
    return planner_pb2.SizedPool(
        role=_ROLES[pool.role],
        node_type=pool.machine.node.name,
        tensor_parallel=layout.tp,
        pipeline_parallel=layout.pp,
        data_parallel=layout.dp,
        expert_parallel=layout.expert_parallel,
        replicas=pool.replicas,
        replicas_fewest=pool.fewest,
        replicas_most=pool.most,
        gpus=pool.gpus,
        binding=pool.binding,
        ttft_s=pool.state.ttft_s,
        itl_s=pool.state.itl_s,
        memory_bytes=dict(pool.serving.memory.terms),
    )
