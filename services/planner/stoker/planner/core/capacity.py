"""What each node still has to give."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from stoker.planner.core.values import Assignment, Deployment, Node


class Capacity:
    """Free GPUs and slots per node and rendezvous ports per host, less everything assigned.

    An assignment holds its share until it is deleted, also while it drains: its process may still be there.
    """

    def __init__(self, nodes: Collection[Node], assignments: Iterable[Assignment]) -> None:
        self._gpus: dict[str, set[int]] = {}
        self._slots: dict[str, int] = {}
        for node in nodes:
            self._gpus[node.id] = set(node.gpus)
            self._slots[node.id] = 0 if node.gpus else node.cpu_slots
        self._host = {node.id: node.host or node.id for node in nodes}
        self._ports: dict[str, set[int]] = {}
        for assignment in assignments:
            self.take(assignment)

    def take(self, assignment: Assignment) -> None:
        """Books what `assignment` uses; its nodes that are not there are passed over."""
        for member in assignment.members:
            if member.gpus:
                self._gpus.get(member.node, set()).difference_update(member.gpus)
            elif member.node in self._slots:
                self._slots[member.node] -= 1
        if assignment.rendezvous_port:
            leader = assignment.members[0].node
            self._ports.setdefault(self._host.get(leader, leader), set()).add(assignment.rendezvous_port)

    def fits(self, node: Node, deployment: Deployment) -> bool:
        """Whether `node` has room for one member of `deployment` now."""
        if deployment.gpus_per_node:
            return len(self._gpus[node.id]) >= deployment.gpus_per_node
        return self._slots[node.id] > 0

    def free(self, node: Node, deployment: Deployment) -> int:
        """Free units of the kind that `deployment` uses, on `node`: GPUs or slots."""
        return len(self._gpus[node.id]) if deployment.gpus_per_node else max(0, self._slots[node.id])

    def free_port(self, node_id: str, ports: range) -> int | None:
        """The lowest of `ports` that no gang led from this node's host uses; None when all are taken."""
        taken = self._ports.get(self._host[node_id], set())
        return next((port for port in ports if port not in taken), None)
