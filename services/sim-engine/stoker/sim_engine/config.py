"""What a simulated engine is started with: the part of vLLM's command line that it understands."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stoker.common.errors import InvalidRequest
from stoker.sim_engine.core.profile import Profile


@dataclass(frozen=True)
class KvEventsConfig:
    """`--kv-events-config`, as vLLM takes it."""

    endpoint: str
    """ZeroMQ address; a wildcard is bound, anything else connected to."""
    replay_endpoint: str | None
    buffer_steps: int
    """Batches kept for replay."""
    topic: str
    hwm: int
    """Batches that may wait for a slow subscriber before new ones are dropped."""

    def of_rank(self, rank: int) -> KvEventsConfig:
        """Those of a data-parallel rank: each publishes on a port of its own, as vLLM's do."""
        replay = self.replay_endpoint
        return replace(
            self,
            endpoint=_next_port(self.endpoint, rank),
            replay_endpoint=_next_port(replay, rank) if replay else None,
        )


@dataclass(frozen=True)
class GangConfig:
    """One member's place in a multi-node engine."""

    size: int
    rank: int
    master_addr: str
    master_port: int
    headless: bool


@dataclass(frozen=True)
class Faults:
    """Misbehaviour on demand."""

    start_delay_s: float = 0.0
    """Seconds before the port opens."""
    crash_after: int = 0
    """Exit with status 1 when this many generation requests have been accepted; 0 never."""
    hang_after: int = 0
    """Stop computing, though still answering HTTP, when this many have been accepted; 0 never."""
    drop_events: int = 0
    """Never send every n-th event batch, though it can be replayed; 0 sends all."""


@dataclass(frozen=True)
class SimConfig:
    """A whole engine."""

    model: Path
    served_names: tuple[str, ...]
    host: str
    port: int
    block_size: int
    """Tokens a KV block."""
    blocks: int
    """KV blocks, one of them set aside."""
    max_model_len: int
    max_output_tokens: int
    """Most tokens that one request may generate; 0 for as many as fit."""
    max_num_seqs: int
    """Requests in a batch, at most."""
    max_num_batched_tokens: int
    """Tokens computed in a step, at most."""
    prefix_caching: bool
    by_priority: bool
    prompt_tokens_details: bool
    """Whether usage tells cached prompt tokens."""
    seed: int
    kv_events: KvEventsConfig | None
    gang: GangConfig | None
    data_parallel: int
    """Ranks, each with a scheduler and a cache of its own."""
    profile: Profile
    faults: Faults
    otlp_endpoint: str = ""
    """Where a span for each generation goes, OTLP over gRPC; empty for nowhere."""


def parse(argv: list[str] | None = None) -> SimConfig:
    """Read a command line. Options of vLLM that mean nothing here are ignored.

    Raises `InvalidRequest` if the model cannot be read, and exits where argparse does.
    """
    options, _ = _parser().parse_known_args(argv)
    model = Path(options.model)
    longest = _longest(model)
    gang = None
    if options.nnodes > 1:
        gang = GangConfig(
            options.nnodes, options.node_rank, options.master_addr, options.master_port, options.headless
        )
    return SimConfig(
        model=model,
        served_names=tuple(options.served_model_name or [str(model)]),
        host=options.host or "0.0.0.0",  # noqa: S104 - as vLLM
        port=options.port,
        block_size=options.block_size,
        blocks=options.num_gpu_blocks_override,
        max_model_len=options.max_model_len or longest,
        max_output_tokens=int((options.override_generation_config or {}).get("max_new_tokens") or 0),
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        prefix_caching=options.enable_prefix_caching,
        by_priority=options.scheduling_policy == "priority",
        prompt_tokens_details=options.enable_prompt_tokens_details,
        seed=options.seed,
        kv_events=_kv_events(options.kv_events_config),
        gang=gang,
        data_parallel=options.data_parallel_size,
        profile=Profile(
            step_s=options.sim_step_ms / 1000,
            prefill_token_s=1 / options.sim_prefill_tokens_per_s,
            decode_sequence_s=options.sim_decode_sequence_ms / 1000,
            context_token_s=options.sim_context_token_ns / 1e9,
            speed=options.sim_speed,
        ),
        faults=Faults(
            start_delay_s=options.sim_start_delay_s,
            crash_after=options.sim_crash_after,
            hang_after=options.sim_hang_after,
            drop_events=options.sim_drop_events,
        ),
        otlp_endpoint=options.otlp_traces_endpoint,
    )


def _parser() -> argparse.ArgumentParser:
    base = Profile()
    parser = argparse.ArgumentParser(
        prog="stoker-sim-engine", description="vLLM's server without a model.", allow_abbrev=False
    )
    parser.add_argument("--model", required=True, help="directory with config.json and tokenizer.json")
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--block-size", type=_count, default=32)
    parser.add_argument("--num-gpu-blocks-override", type=_count, default=2048)
    parser.add_argument("--max-model-len", type=_count)
    parser.add_argument("--max-num-seqs", type=_count, default=256)
    parser.add_argument("--max-num-batched-tokens", type=_count, default=2048)
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--enable-prompt-tokens-details", action="store_true")
    parser.add_argument("--scheduling-policy", choices=("fcfs", "priority"), default="fcfs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kv-events-config", type=json.loads)
    parser.add_argument("--override-generation-config", type=json.loads)
    parser.add_argument("--data-parallel-size", "-dp", type=_count, default=1)
    parser.add_argument("--nnodes", "-n", type=_count, default=1)
    parser.add_argument("--node-rank", "-r", type=int, default=0)
    parser.add_argument("--master-addr", default="127.0.0.1")
    parser.add_argument("--master-port", type=int, default=29501)
    parser.add_argument("--headless", action="store_true")
    parser.add_argument("--otlp-traces-endpoint", default="")
    timing = parser.add_argument_group("timing")
    timing.add_argument("--sim-speed", type=_positive, default=base.speed, help="this many times faster")
    timing.add_argument("--sim-step-ms", type=float, default=base.step_s * 1000)
    timing.add_argument("--sim-prefill-tokens-per-s", type=_positive, default=1 / base.prefill_token_s)
    timing.add_argument("--sim-decode-sequence-ms", type=float, default=base.decode_sequence_s * 1000)
    timing.add_argument("--sim-context-token-ns", type=float, default=base.context_token_s * 1e9)
    faults = parser.add_argument_group("faults")
    faults.add_argument("--sim-start-delay-s", type=float, default=0.0)
    faults.add_argument("--sim-crash-after", type=int, default=0, metavar="REQUESTS")
    faults.add_argument("--sim-hang-after", type=int, default=0, metavar="REQUESTS")
    faults.add_argument("--sim-drop-events", type=int, default=0, metavar="N", help="send not every N-th batch")
    return parser


def _kv_events(given: dict[str, Any] | None) -> KvEventsConfig | None:
    if not given or not given.get("enable_kv_cache_events") or given.get("publisher", "zmq") != "zmq":
        return None
    return KvEventsConfig(
        endpoint=str(given.get("endpoint", "tcp://*:5557")),
        replay_endpoint=given.get("replay_endpoint"),
        buffer_steps=int(given.get("buffer_steps", 10_000)),
        topic=str(given.get("topic", "")),
        hwm=int(given.get("hwm", 100_000)),
    )


def _next_port(endpoint: str, by: int) -> str:
    head, separator, port = endpoint.rpartition(":")
    return f"{head}{separator}{int(port) + by}" if port.isdigit() else endpoint


def _longest(model: Path) -> int:
    try:
        return int(json.loads((model / "config.json").read_text())["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest.field(
            "--model", f"{model} is no model directory with a config.json: {error!r}"
        ) from error


def _positive(text: str) -> float:
    if (value := float(text)) > 0:
        return value
    raise argparse.ArgumentTypeError(f"must be above 0, is {text}")


def _count(text: str) -> int:
    if (value := int(text)) > 0:
        return value
    raise argparse.ArgumentTypeError(f"must be at least 1, is {text}")
