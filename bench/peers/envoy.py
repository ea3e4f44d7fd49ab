"""Envoy as a peer: its own ring hash with bounded loads, keyed by the start of the prompt."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from bench.peers.backends import Backends

_BODY_BYTES = 16 * 1024 * 1024
_BALANCE_PERCENT = 125
_HEADER = "x-prefix-key"

# The same span that smg's prefix_hash takes by default: 256 tokens, or about four times as many characters.
_KEY = """
local span = 1024
function envoy_on_request(handle)
  local body = handle:body()
  if body == nil then return end
  local size = body:length()
  local head = body:getBytes(0, math.min(size, 4096))
  local from = head:find('"messages"', 1, true) or head:find('"prompt"', 1, true) or 1
  local hash = 5381
  for i = from, math.min(from + span, #head) do
    hash = (hash * 33 + head:byte(i)) % 4294967296
  end
  handle:headers():replace("x-prefix-key", string.format("%08x", hash))
end
"""


def config(port: int, backends: Backends) -> dict[str, Any]:
    """A bootstrap that listens on the loopback only."""
    lua = {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua",
        "default_source_code": {"inline_string": _KEY},
    }
    router = {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"}
    route = {
        "cluster": "engines",
        "timeout": "0s",
        "hash_policy": [{"header": {"header_name": _HEADER}}],
    }
    manager = {
        "@type": (
            "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
        ),
        "stat_prefix": "engines",
        "route_config": {
            "virtual_hosts": [
                {"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": route}]},
            ],
        },
        "http_filters": [
            {"name": "envoy.filters.http.lua", "typed_config": lua},
            {"name": "envoy.filters.http.router", "typed_config": router},
        ],
    }
    listener = {
        "address": _socket("127.0.0.1", port),
        "per_connection_buffer_limit_bytes": _BODY_BYTES,
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }
    cluster = {
        "name": "engines",
        "type": "STATIC",
        "connect_timeout": "2s",
        "lb_policy": "RING_HASH",
        "ring_hash_lb_config": {"minimum_ring_size": 1024},
        "common_lb_config": {"consistent_hashing_lb_config": {"hash_balance_factor": _BALANCE_PERCENT}},
        "per_connection_buffer_limit_bytes": _BODY_BYTES,
        "load_assignment": {
            "cluster_name": "engines",
            "endpoints": [{"lb_endpoints": [_endpoint(url) for url in backends.urls]}],
        },
    }
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


def _endpoint(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    return {"endpoint": {"address": _socket(parts.hostname or "", parts.port or 80)}}


def _socket(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}
