"""Accelerators of this host, by NVML where there is one."""

from __future__ import annotations

import structlog

from stoker.api.common.v1 import common_pb2

log = structlog.get_logger(__name__)


def inventory() -> list[common_pb2.Gpu]:
    """All GPUs in the driver's order; none on a host without driver or without the `gpu` extra."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        log.info("gpus.none", because=str(error))
        return []
    try:
        return [_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        log.error("gpus.unreadable", error=str(error))
        return []
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: object, index: int) -> common_pb2.Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)  # type: ignore[attr-defined]  # untyped, optional
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)  # type: ignore[attr-defined]
    bus = _text(nvml.nvmlDeviceGetPciInfo(handle).busId)  # type: ignore[attr-defined]
    return common_pb2.Gpu(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),  # type: ignore[attr-defined]
        name=_text(nvml.nvmlDeviceGetName(handle)),  # type: ignore[attr-defined]
        memory_bytes=memory.total,
        pci_bus_id=pci_address(bus),
        numa_node=_numa_node(pci_address(bus)),
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def pci_address(bus_id: str) -> str:
    """NVML's bus id as the kernel writes it: a domain of four digits, lower case."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _numa_node(address: str) -> int:
    try:
        with open(f"/sys/bus/pci/devices/{address}/numa_node", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return -1
