"""vLLM: its OpenAI server as a child process."""

from __future__ import annotations

import sys

from stoker.node_agent.engine import command
from stoker.node_agent.engine.protocol import Capabilities, KvEndpoint, LaunchCommand, LaunchRequest

_CPU_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
# A worker process of its own spins on shared memory while it waits, and the engine core while that computes. Where
# cores are scarce this is dear: three replicas on two cores serve 1.26 times as much with both in one process.
_ONE_PROCESS_ENV = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
_ENV = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
_CPU_BLOCK_SIZE = 32
"""CPU attention takes multiples of 32 only."""


class VllmEngine:
    """vLLM on the GPUs of the request, or on the CPU when it names none."""

    name = "vllm"
    capabilities = Capabilities(kv_events=True, cache_salt=True, multi_node=True)

    def __init__(self, python: str = sys.executable) -> None:
        self._python = python

    def command(self, request: LaunchRequest) -> LaunchCommand:
        """`python -m vllm…`; a gang member that is not the head runs `vllm serve --headless`."""
        command.check(request)
        headless = request.gang is not None and not request.gang.is_head
        # The headless mode exists in the `serve` command only; the module form of it needs no script on PATH.
        program = ("vllm.entrypoints.cli.main", "serve") if headless else ("vllm.entrypoints.openai.api_server",)
        args = [self._python, "-m", *program, "--model", request.model]
        if not headless:
            args += command.serving_args(request)
        args += ["--tensor-parallel-size", str(request.tensor_parallel)]
        if request.data_parallel > 1:
            args += ["--data-parallel-size", str(request.data_parallel)]
        if on_cpu(request):
            args += ["--block-size", str(_CPU_BLOCK_SIZE)]
        args += [*command.gang_args(request), *request.engine_args]
        return LaunchCommand(tuple(args), command.child_env(_environment(request), request))

    def kv_endpoints(self, request: LaunchRequest) -> tuple[KvEndpoint, ...]:
        """One endpoint a data-parallel rank."""
        return command.kv_endpoints(request)


def on_cpu(request: LaunchRequest) -> bool:
    """Whether this replica runs without a GPU: the planner gave it none."""
    return not request.gpu_indices


def _environment(request: LaunchRequest) -> dict[str, str]:
    env = dict(_ENV)
    if request.model.startswith(("/", "./")):
        env["HF_HUB_OFFLINE"] = "1"
    if on_cpu(request):
        alone = request.tensor_parallel == request.data_parallel == 1 and request.gang is None
        return env | _CPU_ENV | (_ONE_PROCESS_ENV if alone else {})
    return env | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, request.gpu_indices)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
