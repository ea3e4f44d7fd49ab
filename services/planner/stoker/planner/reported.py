"""Agents' records of their hosts, as the planner's core takes them."""

from __future__ import annotations

from stoker.api.common.v1 import common_pb2
from stoker.planner.core.facility.observed import ObservedGpu, ObservedNode
from stoker.planner.core.units import Bytes


def observed(node: common_pb2.Node) -> ObservedNode:
    """What an agent says of its host."""
    gpus = tuple(
        ObservedGpu(gpu.index, gpu.name, Bytes(gpu.memory_bytes), gpu.numa_node, gpu.pci_bus_id)
        for gpu in sorted(node.gpus, key=lambda gpu: gpu.index)
    )
    return ObservedNode(node.node_id, gpus, dict(node.labels))
