"""All settings of a router."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from stoker.common.headers import TENANT
from stoker.common.ticket_keys import TicketKeysConfig
from stoker.common.tls import ServerTlsConfig, TlsConfig
from stoker.router.core import Continuation, HealthConfig, RoutingConfig, TenantLimits


@dataclass(frozen=True)
class ListenConfig:
    """Where the router listens, each host:port; port 0 takes a free one."""

    grpc: Annotated[str, Meta(description="gRPC: InferenceService, RouterService, health")] = "127.0.0.1:7320"
    http: Annotated[str, Meta(description="OpenAI HTTP")] = "127.0.0.1:7380"
    ext_authz: Annotated[
        str, Meta(description="HTTP ext_authz for an Envoy that carries the tokens, for it alone; empty for none")
    ] = ""
    ext_proc: Annotated[
        str,
        Meta(description="gRPC ext_proc, for gateways that speak the endpoint-picker protocol; empty for none"),
    ] = ""
    pick: Annotated[
        str, Meta(description="HTTP for Pick (Connect protocol, JSON), at less cost than gRPC; empty for none")
    ] = ""


@dataclass(frozen=True)
class LimitsConfig:
    """What one request may ask for."""

    max_body_bytes: Annotated[int, Meta(description="largest HTTP body, bytes", ge=1024)] = 16 * 1024 * 1024
    max_in_flight: Annotated[int, Meta(description="requests at once; more are refused with 429", ge=1)] = 4096
    request_s: Annotated[
        float, Meta(description="longest time of a request, seconds; a caller may ask for less", gt=0)
    ] = 3600.0
    connect_s: Annotated[float, Meta(description="to connect to an engine, seconds", gt=0)] = 2.0
    first_byte_s: Annotated[float, Meta(description="to an engine's first byte, seconds", gt=0)] = 600.0
    idle_s: Annotated[
        float, Meta(description="between two pieces of a response, and for a reader to take one, seconds", gt=0)
    ] = 120.0
    retries: Annotated[int, Meta(description="tries on other replicas, of one request", ge=0, le=10)] = 2
    continuation: Annotated[
        Continuation,
        Meta(
            description="answers that break off and go on at another replica: none, greedy ones, or sampled ones too"
        ),
    ] = "sampled"


@dataclass(frozen=True)
class QueueConfig:
    """Requests that wait in the router because the replicas they want are busy."""

    limit: Annotated[int, Meta(description="requests of one model that wait at most; more get 429", ge=1)] = 1024
    longest_s: Annotated[float, Meta(description="longest wait before a request gets 429, seconds", gt=0)] = 120.0


@dataclass(frozen=True)
class TenantsConfig:
    """How callers are told apart, and what each may ask for."""

    header: Annotated[
        str,
        Meta(
            description="HTTP header or gRPC metadata that names the tenant; whoever stands before the router sets it"
        ),
    ] = TENANT
    by_api_key: Annotated[bool, Meta(description="tell those that name no tenant apart by their API key")] = True
    limits: Annotated[TenantLimits, Meta(description="of every tenant that is not named below")] = field(
        default_factory=TenantLimits
    )
    named: Annotated[dict[str, TenantLimits], Meta(description="limits by tenant")] = field(default_factory=dict)


@dataclass(frozen=True)
class ChecksConfig:
    """Direct health checks of the engines."""

    interval_s: Annotated[float, Meta(description="between checks of a replica, seconds", gt=0)] = 1.0
    timeout_s: Annotated[float, Meta(description="for an answer, seconds", gt=0)] = 2.0


@dataclass(frozen=True)
class TokenizerConfig:
    """Tokenizing in the router."""

    inline_bytes: Annotated[
        int, Meta(description="prompts up to this size are tokenized on the event loop, bytes", ge=0)
    ] = 8192
    send_tokens: Annotated[
        Literal["never", "completions", "always"],
        Meta(
            description="send engines the tokens of a prompt in place of its text, where they are proved to read it "
            "alike: never, of completions alone, or always, which is of chats too where engines take them"
        ),
    ] = "always"
    threads: Annotated[int, Meta(description="threads that tokenize longer prompts", ge=1, le=64)] = 2
    cache_dir: Annotated[str, Meta(description="keeps fetched tokenizers across restarts; empty for none")] = ""


@dataclass(frozen=True)
class EnvoyConfig:
    """An Envoy that carries the tokens, where `listen.ext_authz` is set."""

    report_s: Annotated[
        float, Meta(description="between two access log entries of a request under way, seconds", ge=0.01)
    ] = 0.25
    silence_s: Annotated[
        float, Meta(description="a request that Envoy says nothing of for so long has ended, seconds", gt=0)
    ] = 15.0


@dataclass(frozen=True)
class PickConfig:
    """Requests that are picked here and sent by their callers."""

    ticket_s: Annotated[
        float, Meta(description="within which a node must have a picked request, seconds", ge=1, le=600)
    ] = 10.0
    silence_s: Annotated[
        float, Meta(description="a request that its caller says nothing more of is given up, seconds", ge=1)
    ] = 15.0
    alternatives: Annotated[
        int, Meta(description="places named beside the first, where the caller does not say how many", ge=0, le=8)
    ] = 2


@dataclass(frozen=True)
class RecordConfig:
    """Decisions on record, to be replayed: JSON lines of sizes, block keys and outcomes, without prompts."""

    path: Annotated[str, Meta(description="file that decisions are appended to; empty: nothing is recorded")] = ""
    max_bytes: Annotated[
        int, Meta(description="size at which a file is rotated: PATH becomes PATH.1, bytes", ge=65_536)
    ] = 256 * 1024 * 1024
    files: Annotated[int, Meta(description="files kept, the current one included", ge=1, le=1000)] = 4
    queue: Annotated[int, Meta(description="records that wait to be written at most; more are dropped", ge=1)] = 8192


@dataclass(frozen=True)
class RouterConfig:
    """A router."""

    listen: ListenConfig = ListenConfig()
    workers: Annotated[
        int,
        Meta(
            description="processes that share the ports; each is a whole router with limits of its own", ge=1, le=64
        ),
    ] = 1
    registries: Annotated[tuple[str, ...], Meta(description="host:port of every registry")] = ("127.0.0.1:7310",)
    policy: Annotated[
        Literal["stoker", "round_robin"], Meta(description="stoker: by prefix and load; round_robin: the baseline")
    ] = "stoker"
    allow_policy_header: Annotated[
        bool, Meta(description="let a request choose its policy by x-stoker-policy (for benchmarks)")
    ] = False
    limits: LimitsConfig = LimitsConfig()
    queue: QueueConfig = QueueConfig()
    tenants: TenantsConfig = TenantsConfig()
    checks: ChecksConfig = ChecksConfig()
    envoy: EnvoyConfig = EnvoyConfig()
    pick: PickConfig = PickConfig()
    tickets: TicketKeysConfig = field(default_factory=TicketKeysConfig)
    tokenizer: TokenizerConfig = TokenizerConfig()
    grpc_path: Annotated[
        Literal["auto", "engine", "agent"],
        Meta(
            description="gRPC generations go straight to the engine, or by its node agent: slower, but by TLS where "
            "that is on; auto: by the agent where it is on"
        ),
    ] = "auto"
    record: RecordConfig = RecordConfig()
    parity: Annotated[bool, Meta(description="probe that router and engine tokenize alike")] = True
    drain_s: Annotated[float, Meta(description="for requests to finish after SIGTERM, seconds", ge=0)] = 30.0
    metrics_listen: Annotated[
        str, Meta(description="host:port of /metrics, of each further worker one port further; empty for none")
    ] = ""
    otlp_endpoint: Annotated[
        str, Meta(description="OTLP gRPC endpoint for traces, http://host:port; empty for none")
    ] = ""
    otlp_sample: Annotated[
        float, Meta(description="share of requests traced, of those that bring no trace context", ge=0, le=1)
    ] = 1.0
    tls: TlsConfig = field(default_factory=TlsConfig)
    http_tls: ServerTlsConfig = field(default_factory=ServerTlsConfig)
    """Of the OpenAI port. Where empty it shows `tls.certificate`, if there is one, and asks callers for none."""
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
