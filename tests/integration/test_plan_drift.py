"""`stoker plan drift`: a facility file against what agents report to a registry."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from stoker.api.common.v1 import common_pb2
from tests.support.registry import Agent, RegistryUnderTest, node

TOPO = Path(__file__).resolve().parents[1] / "data/imports/topo-hgx.txt"
FILE = """
name: f
sites: {s: {racks: {"r[1-2]": {nodes: {"n[1-2]": dgx-h100}}}}}
"""


def host(name: str, gpus: int, **labels: str) -> common_pb2.Node:
    each = [
        common_pb2.Gpu(index=at, name="NVIDIA H100 80GB HBM3", memory_bytes=81_559 << 20, numa_node=at // 4)
        for at in range(gpus)
    ]
    return node(name, gpus=each, labels=labels)


async def drift(*arguments: str) -> tuple[int | None, str, str]:
    """Exit status, stdout and stderr of the verb in a process of its own."""
    command = (sys.executable, "-c", "from stoker.cli.entry import main; main()", "plan", "drift", *arguments)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_what_agents_report_is_compared_with_the_file(registry: RegistryUnderTest, tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text(FILE)
    to = ("--registry", registry.endpoint)
    async with Agent([registry.endpoint], host("n1", 8, rack="r1")):
        async with Agent([registry.endpoint], host("n2", 8)):
            same = await drift(str(path), *to, "--topo", f"n1={TOPO}")
            assert same == (0, "f: what 2 agents report is what the file says\n", "")
        async with Agent([registry.endpoint], host("n2", 7, rack="r1")):
            status, out, _ = await drift(str(path), *to, "-o", "json")
            assert status == 1
            assert json.loads(out) == {
                "facility": "f",
                "nodes_in_file": 2,
                "nodes_reported": 2,
                "drift": [
                    {"node": "n2", "kind": "gpu_count", "file": "8 GPUs", "agent": "7 GPUs"},
                    {"node": "n2", "kind": "place", "file": "rack r2", "agent": "rack r1"},
                ],
            }
