"""Settings of the registry."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from stoker.common.tls import TlsConfig


@dataclass(frozen=True)
class EtcdConfig:
    """How to reach etcd."""

    endpoints: Annotated[tuple[str, ...], Meta(description="etcd members, host:port each", min_length=1)] = (
        "127.0.0.1:2379",
    )
    ca: Annotated[str, Meta(description="PEM file of the authority to trust; empty for plain text")] = ""
    certificate: Annotated[str, Meta(description="PEM file of the client certificate, where etcd asks for one")] = ""
    key: Annotated[str, Meta(description="PEM file of the client certificate's key")] = ""
    call_timeout_s: Annotated[float, Meta(description="deadline of one etcd call, seconds", gt=0)] = 3.0


@dataclass(frozen=True)
class MembershipConfig:
    """How nodes come and go."""

    lease_ttl_s: Annotated[
        int, Meta(description="a node whose agent is silent is gone after this, seconds", ge=2, le=300)
    ] = 10
    welcome_patience_s: Annotated[
        float, Meta(description="with etcd lost, an agent is admitted without a lease after this, seconds", ge=0)
    ] = 2.0
    drop_share: Annotated[
        float, Meta(description="share of the fleet that may vanish within the grace window", ge=0, le=1)
    ] = 0.2
    grace_s: Annotated[
        float, Meta(description="how long nodes beyond that share are held in view, seconds", ge=0)
    ] = 30.0
    pace_s: Annotated[
        float, Meta(description="after the grace window held nodes go one each such interval, seconds", gt=0)
    ] = 1.0


@dataclass(frozen=True)
class WatchConfig:
    """How watchers are served."""

    stale_s: Annotated[float, Meta(description="etcd unproven for this long makes the view stale, seconds", gt=0)] = (
        10.0
    )
    freshness_s: Annotated[float, Meta(description="each watcher hears a sign of life this often, seconds", gt=0)] = (
        1.0
    )
    stall_s: Annotated[
        float, Meta(description="a watcher that takes nothing for this long is disconnected, seconds", gt=0)
    ] = 15.0
    max_digest_bytes: Annotated[
        int, Meta(description="digest steps waiting for one watcher; beyond it they give way to snapshots", ge=1024)
    ] = 32 * 1024 * 1024
    max_watchers: Annotated[int, Meta(description="watch streams at once; as many routers may announce", ge=1)] = 1000
    max_watchers_per_host: Annotated[int, Meta(description="of these, from one address", ge=1)] = 100


@dataclass(frozen=True)
class LimitsConfig:
    """Bounds of what may be asked for."""

    engines: Annotated[tuple[str, ...], Meta(description="engine kinds that deployments may name")] = ("vllm", "sim")
    replicas: Annotated[int, Meta(description="replicas of one deployment", ge=1)] = 10_000
    digest_keys: Annotated[int, Meta(description="KV blocks of one replica and tier", ge=1)] = 4_000_000


@dataclass(frozen=True)
class RegistryConfig:
    """All settings of a registry."""

    listen: Annotated[str, Meta(description="gRPC address, host:port")] = "127.0.0.1:7310"
    metrics_listen: Annotated[str, Meta(description="Prometheus address, host:port; empty for none")] = ""
    registry_id: Annotated[str, Meta(description="name of this process in logs; host:port where empty")] = ""
    drain_s: Annotated[float, Meta(description="at shutdown, time for unary calls to finish, seconds", ge=0)] = 2.0
    tls: TlsConfig = field(default_factory=TlsConfig)
    etcd: EtcdConfig = field(default_factory=EtcdConfig)
    membership: MembershipConfig = field(default_factory=MembershipConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
