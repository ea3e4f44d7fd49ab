"""What all members of a host share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import aiohttp

from stoker.api.common.v1 import common_pb2
from stoker.common.backoff import Backoff
from stoker.common.ticket_keys import KeyFile
from stoker.common.tls import Tls
from stoker.node_agent.config import AgentConfig, LifecycleConfig
from stoker.node_agent.core.lifecycle import Policy
from stoker.node_agent.ports import Ports
from stoker.node_agent.reports import Reports
from stoker.node_agent.state_files import StateDir


@dataclass(frozen=True)
class Surroundings:
    """The host as its members know it."""

    config: AgentConfig
    policy: Policy
    node: common_pb2.Node
    state: StateDir
    ports: Ports
    session: aiohttp.ClientSession
    reports: Reports
    relayed: Callable[[str], int]
    """Requests now in the agent's own relay, by replica."""
    rng: Random
    tls: Tls | None
    """How other agents are called."""
    keys: KeyFile
    """What signs the tickets that other agents ask for."""


def policy_of(config: LifecycleConfig) -> Policy:
    """The core's times, from the settings."""
    return Policy(
        unhealthy_after_s=config.unhealthy_after_s,
        restart_after_s=config.restart_after_s,
        drain_settle_s=config.drain_settle_s,
        terminate_timeout_s=config.terminate_timeout_s,
        healthy_after_s=config.healthy_after_s,
        backoff=Backoff(first_s=config.backoff_first_s, max_s=config.backoff_max_s),
    )
