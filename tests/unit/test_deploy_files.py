"""What deploy/ hands out can be used as it is: settings that load, units that start what is installed."""

from __future__ import annotations

import configparser
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker.common.config import load
from stoker.node_agent.config import AgentConfig
from stoker.planner.config import PlannerConfig
from stoker.registry.config import RegistryConfig
from stoker.router.config import RouterConfig
from stoker.scaler.config import ScalerConfig

ROOT = Path(__file__).resolve().parents[2]
SERVICES: dict[str, Any] = {
    "registry": RegistryConfig,
    "router": RouterConfig,
    "node-agent": AgentConfig,
    "scaler": ScalerConfig,
    "planner": PlannerConfig,
}


def unit(service: str) -> configparser.SectionProxy:
    parser = configparser.RawConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(ROOT / f"deploy/systemd/stoker-{service}.service")
    return parser["Service"]


@pytest.mark.parametrize("service", SERVICES)
def test_settings_load_and_the_unit_starts_the_service_with_them(service: str) -> None:
    load(SERVICES[service], ROOT / f"deploy/config/{service}.yaml")
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    program, option, path = unit(service)["ExecStart"].split()
    assert Path(program).name in scripts
    assert (option, path) == ("--config", f"/etc/stoker/{service}.yaml")


def test_nothing_in_deploy_is_of_no_service() -> None:
    assert {path.stem for path in (ROOT / "deploy/config").iterdir()} == set(SERVICES)
    assert {path.stem for path in (ROOT / "deploy/systemd").iterdir()} == {
        f"stoker-{service}" for service in SERVICES
    }


def test_stopping_the_agent_spares_its_engines() -> None:
    assert unit("node-agent")["KillMode"] == "process"
    config = load(AgentConfig, ROOT / "deploy/config/node-agent.yaml")
    assert config.on_stop == "keep"
    assert config.state_dir.startswith(f"/var/lib/{unit('node-agent')['StateDirectory']}/")


def test_everybody_knows_every_registry() -> None:
    told: set[tuple[str, ...]] = set()
    for service in SERVICES.keys() - {"registry"}:
        config = load(SERVICES[service], ROOT / f"deploy/config/{service}.yaml")
        told.add(tuple(config.registries))
    assert len(told) == 1
    assert load(RegistryConfig, ROOT / "deploy/config/registry.yaml").listen in next(iter(told))


def test_every_service_asks_its_callers_for_a_certificate() -> None:
    for service in SERVICES:
        tls = load(SERVICES[service], ROOT / f"deploy/config/{service}.yaml").tls
        for path in (tls.certificate, tls.key, tls.ca, tls.client_ca):
            assert path.startswith("/etc/stoker/tls/"), service


def test_what_ends_in_the_compose_file_is_waited_for_and_what_stays_is_watched() -> None:
    """`up --wait` takes what has ended for a failure unless some other service depends on its end."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    ends = {name for name, service in services.items() if service["restart"] == "no"}
    waited_for = {
        name
        for service in services.values()
        if isinstance(on := service.get("depends_on"), dict)
        for name, how in on.items()
        if how["condition"] == "service_completed_successfully"
    }
    assert ends == waited_for == {"model", "deploy"}
    assert all("healthcheck" in services[name] for name in services.keys() - ends)
