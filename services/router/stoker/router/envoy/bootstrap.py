"""Envoy's configuration, made of the router's: a pure function, so that what is handed out can be checked."""

from __future__ import annotations

from typing import Any

from stoker.common.addresses import host_and_port
from stoker.common.errors import InvalidRequest
from stoker.common.otel import CONTEXT_HEADERS
from stoker.openai import RANK_HEADER
from stoker.router.config import RouterConfig
from stoker.router.decisions.decided import DECISION_HEADER, REPLICA_HEADER
from stoker.router.envoy.access_log import FLIGHT_HEADER
from stoker.router.envoy.check import (
    CHECKED,
    RETRIES_HEADER,
    STAND_INS,
    TIMEOUT_HEADER,
    endpoint_header,
    replica_header,
)
from stoker.router.http.engines import OUR_HEADERS

_TYPE = "type.googleapis.com/envoy."
_HCM = f"{_TYPE}extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
_AUTHZ = "envoy.filters.http.ext_authz"
_GRACE_S = 5.0
# What Envoy says where the router does not answer a check. The router never says it, so it can be told apart.
_UNANSWERED = 502
# Of clients, for each request that may be in flight: most connections rest.
_CONNECTIONS = 4
# What an engine fails with before its first byte, and another one may do better: as the OpenAI port has it.
_RETRIED = "connect-failure,refused-stream,reset,gateway-error"
_RETRIED_FROM, _RETRIED_TO = 502, 504
# Of requests under way, those that may be on another try at once; the router's own budget is of all, over time.
_RETRYING_PERCENT, _RETRYING_LEAST = 20, 3
# Answers that Envoy makes itself, by its response flags. Refusals of the router (UAEX) stay as the router wrote them.
_OWN_ANSWERS = {
    "engine_failed": (["UF", "UC", "UH", "UO", "UPE", "UR", "LR", "URX"], "the connection to the engine failed"),
    "deadline_exceeded": (["UT", "SI", "DT", "UMSDR"], "the engine did not answer in time"),
}


def bootstrap(config: RouterConfig, listen: str) -> dict[str, Any]:
    """A whole Envoy configuration before one router, as for `envoy -c`; it listens on host:port `listen`.

    Raises InvalidRequest where the router does not serve Envoy, or an address is none.
    """
    if not config.listen.ext_authz:
        raise InvalidRequest.field("listen.ext_authz", "must be set: Envoy asks there where a request goes")
    most = config.limits.max_in_flight
    clusters = [
        _cluster("router-checks", config.listen.ext_authz, most),
        _cluster("router-http", config.listen.http, most),
        {**_cluster("router-grpc", config.listen.grpc, most), **_http2()},
        *_engines(config),
    ]
    return {
        "static_resources": {"listeners": [_listener(config, listen)], "clusters": clusters},
        "overload_manager": {"resource_monitors": [_most_connections(_CONNECTIONS * most)]},
    }


# --- what listens ------------------------------------------------------------------------------------------


def _listener(config: RouterConfig, listen: str) -> dict[str, Any]:
    manager = {
        "@type": _HCM,
        "stat_prefix": "stoker",
        # The router names requests, by the caller's own name where there is one.
        "generate_request_id": False,
        "server_header_transformation": "PASS_THROUGH",
        # Nobody's x-envoy headers count: they could ask for retries and other times.
        "use_remote_address": True,
        "internal_address_config": {"unix_sockets": False},
        "early_header_mutation_extensions": [_decided_here_alone(config)],
        "stream_idle_timeout": _seconds(config.limits.first_byte_s),
        "request_headers_timeout": "60s",
        "common_http_protocol_options": {"headers_with_underscores_action": "ALLOW", "idle_timeout": "75s"},
        "access_log": [_access_log(_decided())],
        "access_log_options": {"access_log_flush_interval": _seconds(config.envoy.report_s)},
        "local_reply_config": {"mappers": _own_answers()},
        "route_config": {"name": "stoker", "virtual_hosts": [_routes(config)]},
        "http_filters": [
            {"name": _AUTHZ, "typed_config": _authorization(config)},
            {
                "name": "envoy.filters.http.router",
                "typed_config": {
                    "@type": f"{_TYPE}extensions.filters.http.router.v3.Router",
                    "upstream_log": [_access_log(_failed_tries())],
                },
            },
        ],
    }
    return {
        "name": "openai",
        "address": _address("listen", listen),
        "per_connection_buffer_limit_bytes": config.limits.max_body_bytes,
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }


def _decided_here_alone(config: RouterConfig) -> dict[str, Any]:
    """What clients say of it is gone before the router is asked: not each decision says all of it anew."""
    names = [FLIGHT_HEADER, RANK_HEADER]
    for number in _tries(config):
        names += [endpoint_header(number), replica_header(number)]
    kind = f"{_TYPE}extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation"
    return {
        "name": "envoy.http.early_header_mutation.header_mutation",
        "typed_config": {"@type": kind, "mutations": [{"remove": name} for name in names]},
    }


def _most_connections(most: int) -> dict[str, Any]:
    return {
        "name": "envoy.resource_monitors.global_downstream_max_connections",
        "typed_config": {
            "@type": f"{_TYPE}extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
            "max_active_downstream_connections": most,
        },
    }


def _routes(config: RouterConfig) -> dict[str, Any]:
    unchecked = {
        "typed_per_filter_config": {
            _AUTHZ: {"@type": f"{_TYPE}extensions.filters.http.ext_authz.v3.ExtAuthzPerRoute", "disabled": True}
        }
    }
    # None by itself: each decision says how many engines it names.
    policy = {
        "retry_on": _RETRIED,
        "num_retries": 0,
        "retry_back_off": {"base_interval": "0.001s", "max_interval": "0.010s"},
    }
    retried = {"retry_policy": policy} if config.limits.retries else {}
    return {
        "name": "all",
        "domains": ["*"],
        "request_headers_to_remove": [*OUR_HEADERS],
        "response_headers_to_add": [_answered_by(config)],
        "routes": [
            # A route's own limit is off: the router's is told with each decision.
            *(
                {"match": {"path": path}, "route": {"cluster": "engines", "timeout": "0s", **retried}}
                for path in sorted(CHECKED)
            ),
            {"match": {"prefix": "/"}, "route": {"cluster": "router-http", "timeout": "0s"}, **unchecked},
        ],
    }


def _answered_by(config: RouterConfig) -> dict[str, Any]:
    """Which replica it was depends on how often the request was tried."""
    last = _tries(config)[-1]
    replica = f'request.headers["{replica_header(last)}"]'
    for number in reversed(_tries(config)[:-1]):
        replica = (
            f'upstream.request_attempt_count == {number} ? request.headers["{replica_header(number)}"] : {replica}'
        )
    header = {"key": REPLICA_HEADER, "value": f"%CEL({replica})%"}
    return {"header": header, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}


def _authorization(config: RouterConfig) -> dict[str, Any]:
    upstream = [FLIGHT_HEADER, TIMEOUT_HEADER, RETRIES_HEADER, RANK_HEADER, "x-request-id", *CONTEXT_HEADERS]
    for number in _tries(config):
        upstream += [endpoint_header(number), replica_header(number)]
    told = [DECISION_HEADER, "x-request-id"]
    known = ["content-type", "authorization", "x-request-id", *CONTEXT_HEADERS]
    asked = [*known, config.tenants.header, *OUR_HEADERS]
    return {
        "@type": f"{_TYPE}extensions.filters.http.ext_authz.v3.ExtAuthz",
        "http_service": {
            "server_uri": {
                "uri": f"http://{config.listen.ext_authz}",
                "cluster": "router-checks",
                # A request may wait there for a first replica, and then for its turn.
                "timeout": _seconds(2 * config.queue.longest_s + _GRACE_S),
            },
            "authorization_response": {
                "allowed_upstream_headers": _exactly(upstream),
                "allowed_client_headers_on_success": _exactly(told),
                "allowed_client_headers": _exactly(["content-type", "retry-after", "allow", "x-request-id"]),
            },
        },
        "allowed_headers": _exactly([name for name in asked if name]),
        "with_request_body": {"max_request_bytes": config.limits.max_body_bytes, "allow_partial_message": False},
        "failure_mode_allow": False,
        "status_on_error": {"code": _UNANSWERED},
    }


def _decided() -> dict[str, Any]:
    """Most of what happens is not the router's: only requests that it has decided."""
    return {"header_filter": {"header": {"name": FLIGHT_HEADER, "present_match": True}}}


def _failed_tries() -> dict[str, Any]:
    """Those tries after which another may follow: the router moves the request then."""
    broke = {"response_flag_filter": {"flags": ["UF", "UC", "UR", "UPE", "LR", "UO"]}}
    refused = {"and_filter": {"filters": [_status(_RETRIED_FROM, "GE"), _status(_RETRIED_TO, "LE")]}}
    return {"and_filter": {"filters": [_decided(), {"or_filter": {"filters": [broke, refused]}}]}}


def _access_log(chosen: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": "envoy.access_loggers.http_grpc",
        "filter": chosen,
        "typed_config": {
            "@type": f"{_TYPE}extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig",
            "common_config": {
                "log_name": "stoker",
                "transport_api_version": "V3",
                "grpc_service": {"envoy_grpc": {"cluster_name": "router-grpc"}},
                "buffer_flush_interval": "0.020s",
                "buffer_size_bytes": 65536,
            },
            "additional_request_headers_to_log": [FLIGHT_HEADER],
        },
    }


def _own_answers() -> list[dict[str, Any]]:
    mappers = [
        _mapper({"response_flag_filter": {"flags": flags}}, code, message)
        for code, (flags, message) in _OWN_ANSWERS.items()
    ]
    real = [{"filter": _checked_as(said), "status_code": status} for status, said in STAND_INS.items()]
    return [
        *real,
        *mappers,
        _mapper(_status(413), "body_too_large", "the body is larger than this router takes; send less"),
        {
            **_mapper(_checked_as(_UNANSWERED), "unavailable", "the router does not answer; try again"),
            "status_code": 503,
            "headers_to_add": [{"header": {"key": "retry-after", "value": "1"}}],
        },
    ]


def _checked_as(code: int) -> dict[str, Any]:
    """A request that did not pass, for this status of its check."""
    return {"and_filter": {"filters": [{"response_flag_filter": {"flags": ["UAEX"]}}, _status(code)]}}


def _status(code: int, comparison: str = "EQ") -> dict[str, Any]:
    value = {"default_value": code, "runtime_key": f"stoker.status_{code}"}
    return {"status_code_filter": {"comparison": {"op": comparison, "value": value}}}


def _mapper(chosen: dict[str, Any], code: str, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if code == "body_too_large" else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    return {"filter": chosen, "body_format_override": {"json_format": {"error": error}}}


# --- what it calls -----------------------------------------------------------------------------------------


def _tries(config: RouterConfig) -> range:
    return range(1, config.limits.retries + 2)


def _engines(config: RouterConfig) -> list[dict[str, Any]]:
    """Any engines, by the addresses in the decision's headers: one cluster for each try, and one of these."""
    names = [f"engine-{number}" for number in _tries(config)]
    tries = {
        "@type": f"{_TYPE}extensions.clusters.composite.v3.ClusterConfig",
        "clusters": [{"name": name} for name in names],
    }
    whole = {
        "name": "engines",
        "connect_timeout": _seconds(config.limits.connect_s),
        "lb_policy": "CLUSTER_PROVIDED",
        "cluster_type": {"name": "envoy.clusters.composite", "typed_config": tries},
        "per_connection_buffer_limit_bytes": config.limits.max_body_bytes,
        "circuit_breakers": _breakers(config.limits.max_in_flight, retries=True),
    }
    return [whole, *(_engine(config, name, number) for number, name in enumerate(names, 1))]


def _engine(config: RouterConfig, name: str, number: int) -> dict[str, Any]:
    return {
        "name": name,
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "connect_timeout": _seconds(config.limits.connect_s),
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": endpoint_header(number)},
        "per_connection_buffer_limit_bytes": config.limits.max_body_bytes,
        "circuit_breakers": _breakers(config.limits.max_in_flight, retries=True),
    }


def _cluster(name: str, target: str, most: int) -> dict[str, Any]:
    return {
        "name": name,
        "type": "STRICT_DNS",
        "connect_timeout": "2s",
        "circuit_breakers": _breakers(most),
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(name, target)}}]}],
        },
    }


def _http2() -> dict[str, Any]:
    return _options({"explicit_http_config": {"http2_protocol_options": {}}})


def _options(options: dict[str, Any]) -> dict[str, Any]:
    name = "extensions.upstreams.http.v3.HttpProtocolOptions"
    return {"typed_extension_protocol_options": {f"envoy.{name}": {"@type": f"{_TYPE}{name}", **options}}}


def _breakers(most: int, *, retries: bool = False) -> dict[str, Any]:
    # The router bounds what is in flight; Envoy's own bounds, 1024 each, would come before it.
    names = ("max_connections", "max_pending_requests", "max_requests")
    budget = {"budget_percent": {"value": _RETRYING_PERCENT}, "min_retry_concurrency": _RETRYING_LEAST}
    return {"thresholds": [{**dict.fromkeys(names, 2 * most), **({"retry_budget": budget} if retries else {})}]}


def _address(field: str, target: str) -> dict[str, Any]:
    found = host_and_port(target)
    if found is None or not all(found):
        raise InvalidRequest.field(field, f"must be host:port with a port of its own, not {target!r}")
    host, port = found
    return {"socket_address": {"address": host, "port_value": port}}


def _exactly(names: list[str]) -> dict[str, Any]:
    return {"patterns": [{"exact": name, "ignore_case": True} for name in names]}


def _seconds(value: float) -> str:
    return f"{value:.3f}s"
