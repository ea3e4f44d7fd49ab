"""What an operator can set for a planner."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from stoker.common.tls import TlsConfig
from stoker.control.config import LoopConfig


@dataclass(frozen=True)
class LossConfig:
    """When a node that vanished counts as lost, so that what it ran is placed elsewhere."""

    grace_s: Annotated[
        float, Meta(description="absence after which one node's replicas are placed elsewhere, seconds", ge=0)
    ] = 20.0
    mass_share: Annotated[
        float,
        Meta(
            description="share of the nodes in use that may be absent before it looks like a lost network", gt=0, le=1
        ),
    ] = 0.34
    mass_grace_s: Annotated[
        float, Meta(description="absence that counts while more than mass_share are absent, seconds", ge=0)
    ] = 300.0
    settle_s: Annotated[
        float,
        Meta(description="time a node that was given up takes nothing new after its return, seconds", ge=0),
    ] = 15.0


@dataclass(frozen=True)
class RetireConfig:
    """How long a replica that leaves may have its prompts computed on others, before it drains."""

    timeout_s: Annotated[
        float, Meta(description="longest time that warming others may take, seconds", ge=0, le=3_600)
    ] = 30.0
    grace_s: Annotated[
        float, Meta(description="time beyond that after which its agent is not waited for any more, seconds", ge=0)
    ] = 5.0


@dataclass(frozen=True)
class RendezvousConfig:
    """Ports on which the nodes of a gang meet, on the gang's first node."""

    first_port: Annotated[int, Meta(description="first port of the range", ge=1024, le=65_000)] = 29_500
    ports: Annotated[int, Meta(description="size of the range: gangs that one node can lead", ge=1, le=500)] = 200


@dataclass(frozen=True)
class SearchConfig:
    """How long to look for better places than the first ones found."""

    round_s: Annotated[
        float,
        Meta(description="longest search for a batch in one round, seconds; 0: the first places found", ge=0, le=60),
    ] = 2.0
    least_replicas: Annotated[
        int, Meta(description="replicas with GPUs from which on a round searches though all find a place", ge=1)
    ] = 4
    answer_s: Annotated[float, Meta(description="longest computation for a caller, seconds", gt=0, le=86_400)] = 300.0


@dataclass(frozen=True)
class PlannerConfig:
    """Settings of one planner process."""

    listen: Annotated[str, Meta(description="host:port of the gRPC server; port 0 takes a free one")] = (
        "127.0.0.1:7350"
    )
    metrics_listen: Annotated[str, Meta(description="host:port of /metrics; empty for none")] = ""
    registries: Annotated[
        tuple[str, ...], Meta(description="host:port of every registry; one that answers is enough", min_length=1)
    ] = ("127.0.0.1:7310",)
    loss: LossConfig = field(default_factory=LossConfig)
    retire: RetireConfig = field(default_factory=RetireConfig)
    rendezvous: RendezvousConfig = field(default_factory=RendezvousConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
