"""The deployment that a local stack serves: the tiny model, or one the user names."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from stoker.api.common.v1 import common_pb2
from stoker.local.plan import EngineKind

TINY = "tiny"

# KV cache of a replica in measurements: small enough that not everything fits, as in production.
PRESSURE_BLOCKS, PRESSURE_BLOCK_SIZE = 300, 32
_MAX_MODEL_LEN = 8192
_GPU_SHARE = 0.25
_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


@dataclass(frozen=True)
class LocalDeployment:
    """What to serve."""

    engine: EngineKind
    replicas: int = 3
    model: str = ""
    """Directory or hub id; empty for the tiny model."""
    on_gpu: bool = False
    pressure: bool = False
    """A KV cache of `PRESSURE_BLOCKS` blocks, for measurements."""
    sim_speed: float = 1.0
    """How many times faster than the tiny model on one core a simulated engine is."""

    @property
    def name(self) -> str:
        """Name of the deployment, and by which clients ask for it."""
        if not self.model:
            return TINY
        last = Path(self.model.rstrip("/")).name.lower()
        return re.sub(r"[^a-z0-9]+", "-", last).strip("-")[:63].strip("-") or "model"

    def spec(self, model_dir: Path | None = None) -> common_pb2.DeploymentSpec:
        """The specification; `model_dir` is where the tiny model lies. Builds it there if needed."""
        from stoker.local import model  # numpy: not for every verb

        if self.model:
            # A directory is told to agents that may run elsewhere; a hub id is left as it is.
            path = str(Path(self.model).resolve()) if Path(self.model).is_dir() else self.model
        else:
            path = str(model.cached() if model_dir is None else model.build(model_dir))
        args: list[str] = []
        if self.engine == "vllm":
            args += self._vllm_args()
        if self.engine == "sim":
            args += ["--sim-speed", f"{self.sim_speed:g}"]
        if self.pressure:
            args += ["--num-gpu-blocks-override", str(PRESSURE_BLOCKS), "--block-size", str(PRESSURE_BLOCK_SIZE)]
        if self.pressure or not self.model:
            args += ["--max-model-len", str(_MAX_MODEL_LEN)]
        return common_pb2.DeploymentSpec(
            name=self.name,
            model=path,
            engine=self.engine,
            engine_args=args,
            replicas=self.replicas,
            gpus_per_node=1 if self.on_gpu and self.engine == "vllm" else 0,
            drain_timeout_s=20,
        )

    def _vllm_args(self) -> list[str]:
        args = []
        if not self.model:
            # Compiling a model this small costs more than it ever saves; its template marks calls as Hermes does.
            args += ["--enforce-eager", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
            if not self.on_gpu and not has_bfloat16():
                args += ["--dtype", "float32"]
        if self.on_gpu:
            args += ["--gpu-memory-utilization", str(_GPU_SHARE)]
        return args


def has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this machine's cores multiply the tiny model's numbers as they are; also where it does not say.

    vLLM emulates them otherwise: on an EPYC with AVX2 alone a prompt of 2,800 tokens took 18 s, and 4.5 in float32.
    """
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return True
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), None)
    return flags is None or not _BFLOAT16.isdisjoint(flags)


def has_gpu() -> bool:
    """Whether this machine seems to have an NVIDIA GPU."""
    return shutil.which("nvidia-smi") is not None and any(Path("/dev").glob("nvidia[0-9]*"))
