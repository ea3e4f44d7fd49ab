"""The simulated engine: vLLM's server without a model, for tests and for fleets larger than the machine."""

from __future__ import annotations

import sys

from stoker.node_agent.engine import command
from stoker.node_agent.engine.protocol import Capabilities, KvEndpoint, LaunchCommand, LaunchRequest


class SimEngine:
    """`stoker.sim_engine` as a child process; it takes vLLM's arguments."""

    name = "sim"
    capabilities = Capabilities(kv_events=True, cache_salt=True, multi_node=True)

    def __init__(self, python: str = sys.executable) -> None:
        self._python = python

    def command(self, request: LaunchRequest) -> LaunchCommand:
        """`python -m stoker.sim_engine.app …`."""
        command.check(request)
        args = [self._python, "-m", "stoker.sim_engine.app", "--model", request.model]
        if request.gang is None or request.gang.is_head:
            args += command.serving_args(request)
            args += ["--data-parallel-size", str(request.data_parallel)]
        args += [*command.gang_args(request), *request.engine_args]
        return LaunchCommand(tuple(args), command.child_env({}, request))

    def kv_endpoints(self, request: LaunchRequest) -> tuple[KvEndpoint, ...]:
        """One endpoint for each data-parallel rank."""
        return command.kv_endpoints(request)
