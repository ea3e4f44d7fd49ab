"""GPUs as they can be had: what one can do, how many are in a host, and how they reach each other."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.planner.core.facility.values import GpuType, NodeType
from stoker.planner.core.sizing.factors import FABRIC_S, NVLINK_S, PCIE_S


@dataclass(frozen=True, slots=True)
class Link:
    """What one GPU can send to others: bytes per second one way, and seconds that any message takes at least."""

    rate: float
    latency_s: float
    name: str


@dataclass(frozen=True, slots=True)
class Machine:
    """Hosts of one type. `domain` is the number of GPUs that reach each other by NVLink or its like, 1 where none
    do; it may span hosts."""

    gpu: GpuType
    node: NodeType
    domain: int

    @property
    def name(self) -> str:
        """Of the GPU type, with the host's where that says more."""
        return f"{self.gpu.name} in {self.node.name}"

    @property
    def per_node(self) -> int:
        """GPUs of one host."""
        return max(1, self.node.gpus)

    @property
    def fabric_rate(self) -> float:
        """Of one GPU into the fabric, bytes per second one way; 0 where hosts have no fabric."""
        return self.node.fabric_ports * self.node.port_rate / self.per_node

    @property
    def cost_per_hour(self) -> float:
        """Of one GPU, with its part of the host; 0 where nobody said."""
        return self.node.cost_per_hour / self.per_node

    def link(self, ranks: int) -> Link | None:
        """The slowest link among so many neighbouring GPUs; None where nothing connects them."""
        if ranks <= self.domain and self.gpu.scale_up_bandwidth:
            return Link(float(self.gpu.scale_up_bandwidth), NVLINK_S, "NVLink")
        if ranks <= self.per_node and self.gpu.pcie_bandwidth:
            return Link(float(self.gpu.pcie_bandwidth), PCIE_S, "PCIe")
        if ranks > self.per_node and self.fabric_rate:
            return Link(self.fabric_rate, FABRIC_S, "fabric")
        return None

    def watts(self, busy: float) -> float:
        """Of one GPU with its part of the host, `busy` being the share of its time that it computes."""
        idle, most = float(self.node.idle_power), float(self.node.max_power)
        if not most:
            return float(self.gpu.max_power)
        return (idle + (most - idle) * min(1.0, max(0.0, busy))) / self.per_node
