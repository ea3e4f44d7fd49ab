"""What the node agent asks of an inference engine, whichever engine it is.

Every engine is one child process that serves the OpenAI HTTP API, `/health`, `/metrics` and `/tokenize`,
and publishes KV-block events over ZeroMQ. What differs is the command line, so an `Engine` only writes
commands and says where events come from; `stoker.node_agent.engine.client.EngineClient` talks to all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class Gang:
    """One member's place in a replica that spans nodes. Rank 0 is the head: it alone serves HTTP."""

    rank: int
    size: int
    master_addr: str
    """Address of the head's node that the other members can reach."""
    master_port: int

    @property
    def is_head(self) -> bool:
        """Whether this member serves HTTP and publishes KV events."""
        return self.rank == 0


@dataclass(frozen=True)
class LaunchRequest:
    """Everything an engine process is told. Ports are chosen by the caller and free at launch."""

    model: str
    """Model directory, or a hub id that the host can resolve."""
    served_model_name: str
    http_port: int
    kv_events_port: int
    """First of `data_parallel` consecutive ports; events of data-parallel rank r are on port + r."""
    kv_replay_port: int
    """First of `data_parallel` consecutive ports; replay of rank r is on port + r."""
    log_path: Path
    """Where the caller sends the child's stdout and stderr."""
    host: str = "127.0.0.1"
    """Address the HTTP server binds. KV events and replay stay on the loopback whatever this is."""
    engine_args: tuple[str, ...] = ()
    """Further command-line arguments, last, so that they win over Stoker's defaults."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Further environment, over the engine's defaults."""
    tensor_parallel: int = 1
    """GPUs that share each layer, over all members of a gang together."""
    data_parallel: int = 1
    """Copies of the model inside this one engine; 1 unless the deployment asks the engine to balance itself."""
    max_output_tokens: int = 0
    """Most tokens that one request may generate, whichever way it comes; 0 for the engine's own bound."""
    gpu_indices: tuple[int, ...] = ()
    """GPUs this process may see, by NVML index. Empty: the engine runs on the CPU."""
    gang: Gang | None = None

    @property
    def base_url(self) -> str:
        """Where the agent reaches the HTTP server: a wildcard bind is reached by the loopback."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(self.host, self.host)  # noqa: S104
        return f"http://{host}:{self.http_port}"


@dataclass(frozen=True)
class LaunchCommand:
    """A child process to start: argument list and complete environment. Never a shell."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True)
class KvEndpoint:
    """Where one data-parallel rank's KV events meet the agent.

    The *agent* binds `events` and the engine connects to it (an engine given a loopback address connects;
    it binds only wildcards, which would show prompts' token ids to the network). The engine binds
    `replay`; the agent connects.
    """

    events: str
    replay: str
    dp_rank: int = 0


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do, for deciding what to rely on."""

    kv_events: bool
    cache_salt: bool
    multi_node: bool


class Health(Enum):
    """What `/health` said."""

    SERVING = "serving"
    UNHEALTHY = "unhealthy"
    """The server answers, and says that its engine is dead."""
    UNREACHABLE = "unreachable"
    """Nothing answered in time: still starting, hung, or gone."""


@dataclass(frozen=True)
class EngineInfo:
    """Constants of a running engine. `None` means that the engine does not say."""

    model: str
    max_model_len: int | None
    """Tokens, prompt plus output."""
    block_size: int | None
    """Tokens a KV block."""
    kv_blocks: int | None
    """KV blocks in the whole engine, all data-parallel ranks together."""
    cache_dtype: str | None
    prefix_caching: bool | None
    version: str | None
    lora_adapters: tuple[str, ...] = ()
    """Served names beyond the base model."""


@dataclass(frozen=True)
class Histogram:
    """A cumulative Prometheus histogram: seconds summed, observations, and (upper bound, count) pairs."""

    sum: float
    count: float
    buckets: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class EngineLoad:
    """One scrape of `/metrics`, data-parallel ranks summed (usage averaged).

    `None` means that the engine did not say: unknown is not zero. Counters only grow, and fall back to
    zero when the engine restarts.
    """

    running: int | None = None
    """Requests in the running batch."""
    waiting: int | None = None
    """Requests queued before prefill."""
    kv_cache_usage: float | None = None
    """Share of KV blocks in use by running requests, 0 to 1."""
    prefix_cache_queries: float | None = None
    """Prompt tokens looked up in the prefix cache, total."""
    prefix_cache_hits: float | None = None
    """Prompt tokens found there, total."""
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    cached_prompt_tokens: float | None = None
    preemptions: float | None = None
    prefill_seconds: Histogram | None = None
    """From being scheduled to the first token."""
    queue_seconds: Histogram | None = None
    """From arrival to being scheduled."""
    ttft_seconds: Histogram | None = None
    """From arrival to the first token."""
    itl_seconds: Histogram | None = None
    e2e_seconds: Histogram | None = None


@runtime_checkable
class Engine(Protocol):
    """A kind of engine. Stateless: one instance serves any number of replicas."""

    @property
    def name(self) -> str:
        """The name used in deployment specs: `vllm` or `sim`."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What this kind of engine can do."""
        ...

    def command(self, request: LaunchRequest) -> LaunchCommand:
        """The process to start. Raises `InvalidRequest` naming the field if it can never start."""
        ...

    def kv_endpoints(self, request: LaunchRequest) -> tuple[KvEndpoint, ...]:
        """One endpoint a data-parallel rank; none for a gang member that is not the head."""
        ...
