"""Settings of the node agent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from stoker.common.ticket_keys import TicketKeysConfig
from stoker.common.tls import TlsConfig

Seconds = Annotated[float, Meta(gt=0, le=86_400)]


@dataclass(frozen=True)
class LifecycleConfig:
    """When an engine counts as started, unwell, failed or stopped."""

    probe_interval_s: Annotated[Seconds, Meta(description="Seconds between health checks of an engine.")] = 1.0
    probe_timeout_s: Annotated[Seconds, Meta(description="Seconds an engine may take to answer one.")] = 5.0
    unhealthy_after_s: Annotated[
        Seconds, Meta(description="Seconds without an answer after which a ready engine is UNHEALTHY.")
    ] = 10.0
    restart_after_s: Annotated[
        Seconds, Meta(description="Seconds without an answer after which an engine is killed and started again.")
    ] = 60.0
    startup_timeout_s: Annotated[
        Seconds, Meta(description="Seconds from launch to ready where the deployment does not say.")
    ] = 600.0
    drain_timeout_s: Annotated[
        Seconds, Meta(description="Seconds a draining engine may take where the deployment does not say.")
    ] = 120.0
    drain_settle_s: Annotated[
        float, Meta(ge=0, description="Seconds a drain lasts at least: requests already on their way still arrive.")
    ] = 1.0
    terminate_timeout_s: Annotated[Seconds, Meta(description="Seconds between SIGTERM and SIGKILL.")] = 15.0
    backoff_first_s: Annotated[Seconds, Meta(description="Pause before the first restart, in seconds.")] = 1.0
    backoff_max_s: Annotated[Seconds, Meta(description="Longest pause before a restart, in seconds.")] = 60.0
    healthy_after_s: Annotated[
        Seconds, Meta(description="Seconds of being ready after which earlier failures are forgotten.")
    ] = 300.0


@dataclass(frozen=True)
class ReportConfig:
    """What the agent tells, and how often."""

    load_interval_s: Annotated[Seconds, Meta(description="Seconds between scrapes of an engine's metrics.")] = 0.5
    load_timeout_s: Annotated[Seconds, Meta(description="Seconds one scrape may take.")] = 2.0
    digest_interval_s: Annotated[Seconds, Meta(description="Longest wait of a block change, in seconds.")] = 0.05
    digest_batch: Annotated[int, Meta(ge=1, le=1_000_000, description="Block changes that are sent at once.")] = 1000
    checkpoint_interval_s: Annotated[
        Seconds, Meta(description="Seconds between copies of the block digests on disk.")
    ] = 30.0


@dataclass(frozen=True)
class RelayConfig:
    """Bounds of the token streams that go through the agent."""

    max_streams: Annotated[int, Meta(ge=1, le=100_000, description="Streams at once, all replicas together.")] = 2048
    buffer_bytes: Annotated[
        int, Meta(ge=4096, le=64 << 20, description="Output that may wait for one slow reader, in bytes.")
    ] = 1 << 20
    reader_timeout_s: Annotated[
        Seconds, Meta(description="Seconds a reader may stand still with its buffer full before it is cut off.")
    ] = 10.0
    connect_timeout_s: Annotated[Seconds, Meta(description="Seconds to connect to an engine.")] = 5.0
    default_deadline_s: Annotated[
        Seconds, Meta(description="Seconds a call without a deadline of its own may take.")
    ] = 3600.0
    max_choices: Annotated[int, Meta(ge=1, le=1024, description="Largest `n` of one request.")] = 128


@dataclass(frozen=True)
class RetireConfig:
    """How the prompts of a replica that leaves are computed on others."""

    prompt_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=64 << 30,
            description="Memory for the token ids of the blocks that one KV cache holds, in bytes; 0 keeps none, and "
            "then nothing can be computed elsewhere.",
        ),
    ] = 256 << 20
    busy_pause_s: Annotated[
        Seconds, Meta(description="Seconds until a successor that has enough to do is asked again.")
    ] = 0.5


@dataclass(frozen=True)
class TicketsConfig(TicketKeysConfig):
    """Whose requests the agent takes."""

    required: Annotated[
        bool,
        Meta(description="With keys: refuse requests without a ticket. Off while routers come to have the keys."),
    ] = True
    skew_s: Annotated[
        float, Meta(ge=0, le=3600, description="Seconds by which a router's clock may differ from this host's.")
    ] = 5.0


@dataclass(frozen=True)
class AgentConfig:
    """The node agent."""

    node_id: Annotated[
        str, Meta(description="Stable identity of the host, unique in the fleet; empty for the host name.")
    ] = ""
    listen: Annotated[str, Meta(description="host:port of the gRPC server; port 0 takes a free one.")] = (
        "0.0.0.0:7330"
    )
    advertise: Annotated[
        str, Meta(description="host[:port] under which others reach this host; empty derives it from `listen`.")
    ] = ""
    registries: Annotated[
        list[str], Meta(description="host:port of each registry; none for a host that stands alone.")
    ] = field(default_factory=list)
    state_dir: Annotated[
        str, Meta(description="Directory for what must survive the agent: engine records, digests, logs.")
    ] = "/var/lib/stoker/node-agent"
    engines: Annotated[list[Literal["vllm", "sim"]], Meta(description="Engine kinds this host may launch.")] = field(
        default_factory=lambda: ["vllm"]
    )
    python: Annotated[str, Meta(description="Python that runs engines; empty for the agent's own.")] = ""
    engine_host: Annotated[
        str, Meta(description="Address engines' HTTP servers bind; empty for the host of `listen`.")
    ] = ""
    cpu_slots: Annotated[
        int, Meta(ge=0, le=1024, description="Replicas to run where the host has no accelerator.")
    ] = 0
    labels: Annotated[dict[str, str], Meta(description="Labels of the host: rack, row, feed, region.")] = field(
        default_factory=dict
    )
    max_log_bytes: Annotated[
        int, Meta(ge=65_536, description="Size at which an engine's log is rotated, in bytes; one old one is kept.")
    ] = 64 << 20
    on_stop: Annotated[
        Literal["keep", "drain"],
        Meta(description="What SIGTERM does to engines: `keep` leaves them to the next agent, `drain` stops them."),
    ] = "keep"
    stop_grace_s: Annotated[
        float, Meta(ge=0, le=3600, description="Seconds that running calls may take to finish after SIGTERM.")
    ] = 10.0
    metrics_listen: Annotated[str, Meta(description="host:port of /metrics; empty for none.")] = ""
    otlp_endpoint: Annotated[
        str, Meta(description="OTLP gRPC endpoint for traces, http://host:port; empty for none.")
    ] = ""
    otlp_sample: Annotated[
        float, Meta(description="Share of requests traced, of those that bring no trace context.", ge=0, le=1)
    ] = 1.0
    tickets: TicketsConfig = field(default_factory=TicketsConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    lifecycle: LifecycleConfig = field(default_factory=LifecycleConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    relay: RelayConfig = field(default_factory=RelayConfig)
    retire: RetireConfig = field(default_factory=RetireConfig)
