"""Whole local stacks for tests, and the `stoker` command as a user runs it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.cli.serving import Serving, put_and_wait
from stoker.local import process
from stoker.local.deployment import LocalDeployment
from stoker.local.plan import StackSpec, make_plan
from stoker.local.stack import LocalStack
from stoker.local.state import Home

STOKER = str(Path(sys.executable).with_name("stoker"))


@contextmanager
def serving(
    home: Path, deployment: LocalDeployment, *, routers: int = 1, nodes: int = 0, timeout_s: float = 300
) -> Iterator[Serving]:
    """A stack with its deployment ready. It ends with the block, and with this process if that is killed."""
    stack = LocalStack(Home(home))
    spec = StackSpec(
        deployment.engine,
        nodes=nodes or deployment.replicas,
        routers=routers,
        fixed_ports=False,
        policy_header=True,
    )

    async def start() -> Serving:
        async with asyncio.timeout(timeout_s):
            state = await stack.start(make_plan(spec, stack.home), lambda _: None, tied=True)
            return await put_and_wait(state, deployment, lambda _: None)

    try:
        yield asyncio.run(start())
    finally:
        asyncio.run(stack.stop())
        assert process.writing_under(stack.home.run) == []


@dataclass(frozen=True)
class Cli:
    """The command, with a home of its own."""

    home: Path

    @property
    def env(self) -> dict[str, str]:
        """Nothing of the developer's own stack."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("STOKER_")}
        return {**kept, "STOKER_HOME": str(self.home)}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a verb."""
        return subprocess.Popen(
            [STOKER, *arguments], env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, *arguments: str, status: int = 0, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a verb to its end and see that its exit status is as expected."""
        done = subprocess.run(
            [STOKER, *arguments], env=self.env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == status, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def json(self, *arguments: str, timeout_s: float = 120) -> Any:
        """Run a verb with `-o json`: its stdout is one document."""
        return json.loads(self.run(*arguments, "-o", "json", timeout_s=timeout_s).stdout)

    def left(self) -> list[process.ProcessId]:
        """Processes of stacks under this home that still run."""
        return process.writing_under(self.home)
