"""Envoy's configuration: what it says, and that Envoy itself takes it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from stoker.common.config import load
from stoker.common.errors import InvalidRequest
from stoker.router.config import RouterConfig
from stoker.router.envoy.binary import binary
from stoker.router.envoy.bootstrap import bootstrap

ROOT = Path(__file__).resolve().parents[2]
AT = "127.0.0.1:7480"
ASKS = "listen.ext_authz=127.0.0.1:7381"


def made(*settings: str) -> dict[str, Any]:
    return bootstrap(load(RouterConfig, None, [ASKS, *settings]), AT)


def manager(of: dict[str, Any]) -> dict[str, Any]:
    listener = of["static_resources"]["listeners"][0]
    return dict(listener["filter_chains"][0]["filters"][0]["typed_config"])


def authorization(of: dict[str, Any]) -> dict[str, Any]:
    return dict(manager(of)["http_filters"][0]["typed_config"])


def cluster(of: dict[str, Any], name: str) -> dict[str, Any]:
    return next(dict(each) for each in of["static_resources"]["clusters"] if each["name"] == name)


def test_bounds_are_those_of_the_router() -> None:
    config = made(
        "limits.max_body_bytes=123456", "limits.max_in_flight=5000", "queue.longest_s=7", "limits.connect_s=3"
    )
    assert authorization(config)["with_request_body"]["max_request_bytes"] == 123456
    assert authorization(config)["http_service"]["server_uri"]["timeout"] == "19.000s", (
        "longer than a first replica and a turn may take"
    )
    assert cluster(config, "engines")["connect_timeout"] == "3.000s"
    for name in ("engines", "router-checks"):
        assert cluster(config, name)["circuit_breakers"]["thresholds"][0]["max_requests"] >= 5000


def test_nobody_passes_where_the_router_does_not_answer() -> None:
    checks = authorization(made())
    assert checks["failure_mode_allow"] is False
    assert checks["with_request_body"]["allow_partial_message"] is False


def test_only_decided_paths_reach_engines() -> None:
    routes = manager(made())["route_config"]["virtual_hosts"][0]["routes"]
    engines = [route for route in routes if route["route"]["cluster"] == "engines"]
    decided = {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize"}
    assert {route["match"]["path"] for route in engines} == decided
    assert not any("typed_per_filter_config" in route for route in engines), "each of them is asked about"


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_each_try_has_a_header_of_its_own_and_nothing_is_tried_unasked(retries: int) -> None:
    config = made(f"limits.retries={retries}")
    tries = cluster(config, "engines")["cluster_type"]["typed_config"]["clusters"]
    headers = [cluster(config, each["name"])["original_dst_lb_config"]["http_header_name"] for each in tries]
    assert len(set(headers)) == len(headers) == 1 + retries
    passed = authorization(config)["http_service"]["authorization_response"]["allowed_upstream_headers"]["patterns"]
    assert set(headers) <= {each["exact"] for each in passed}
    for route in manager(config)["route_config"]["virtual_hosts"][0]["routes"]:
        assert route["route"].get("retry_policy", {}).get("num_retries", 0) == 0


def test_the_header_of_tenants_is_passed_on_as_it_is_named() -> None:
    def passed(of: dict[str, Any]) -> set[str]:
        return {each["exact"] for each in authorization(of)["allowed_headers"]["patterns"]}

    assert "x-team" in passed(made("tenants.header=x-team"))
    assert "" not in passed(made("tenants.header=''"))


def test_trace_context_goes_to_the_router_and_on_to_the_engine() -> None:
    service = authorization(made())
    asked = service["allowed_headers"]["patterns"]
    passed = service["http_service"]["authorization_response"]["allowed_upstream_headers"]["patterns"]
    for patterns in (asked, passed):
        assert {"traceparent", "tracestate"} <= {each["exact"] for each in patterns}


@pytest.mark.parametrize("listen", ["7480", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:70000", ":7480"])
def test_an_address_that_is_none_is_refused(listen: str) -> None:
    with pytest.raises(InvalidRequest, match="host:port"):
        bootstrap(load(RouterConfig, None, [ASKS]), listen)


def test_a_router_that_does_not_serve_envoy_has_no_configuration() -> None:
    with pytest.raises(InvalidRequest, match="ext_authz"):
        bootstrap(RouterConfig(), AT)


def test_what_deploy_hands_out_is_what_is_made() -> None:
    assert yaml.safe_load((ROOT / "deploy/envoy/envoy.yaml").read_text()) == made()


def test_the_command_prints_it() -> None:
    argv = [sys.executable, "-m", "stoker.router.envoy", "--listen", AT, "--set", ASKS]
    printed = subprocess.run(argv, capture_output=True, check=True, timeout=60).stdout
    assert yaml.safe_load(printed) == made()


@pytest.mark.parametrize(
    "settings", [(), ("tenants.header=''", "envoy.report_s=2", "limits.max_body_bytes=4096"), ("limits.retries=0",)]
)
def test_envoy_takes_it(tmp_path: Path, settings: tuple[str, ...]) -> None:
    file = tmp_path / "envoy.json"
    file.write_bytes(msgspec.json.encode(made(*settings)))
    argv = [str(binary()), "--mode", "validate", "-l", "error", "-c", str(file)]
    checked = subprocess.run(argv, capture_output=True, check=False, timeout=60)
    assert checked.returncode == 0, checked.stderr.decode()
