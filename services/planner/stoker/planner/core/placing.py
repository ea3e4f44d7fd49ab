"""Around the search for places: ports of gangs, and words on why nothing was found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from stoker.planner.core.capacity import Capacity
from stoker.planner.core.placement import Member
from stoker.planner.core.placement.conflicts import counted_nodes
from stoker.planner.core.values import Assignment, Deployment, Node

JUST_BACK = "only just back"
UNLISTED = "not in the facility"
"""Why a node gets nothing new."""


def assignment(
    replica: str, deployment: Deployment, members: tuple[Member, ...], capacity: Capacity, ports: range
) -> Assignment | None:
    """`members` as a replica; None where none of those that could lead it has a port left. Books nothing.

    A ring may begin anywhere, but for tensor-parallel groups over several members, which keep their ranks together.
    """
    if deployment.gang_size == 1:
        return Assignment(replica, deployment.name, deployment.spec, members)
    step = max(1, deployment.wishes.tensor_parallel // max(1, deployment.gpus_per_node))
    for start in range(0, len(members), step):
        port = capacity.free_port(members[start].node, ports)
        if port is not None:
            turned = members[start:] + members[:start]
            return Assignment(replica, deployment.name, deployment.spec, turned, rendezvous_port=port)
    return None


def why_not(
    deployment: Deployment, nodes: Sequence[Node], capacity: Capacity, closed: Mapping[str, str], against: str = ""
) -> str:
    """Why no place was found, with the numbers, and what would help; `against` is what the placement says of it,
    which counts where there are free GPUs enough. `closed` nodes get nothing new, each for a reason."""
    size, gpus = deployment.gang_size, deployment.gpus_per_node
    one = f"{gpus} free GPU{'s' * (gpus > 1)}" if gpus else "a free CPU slot"
    need = f"needs {counted_nodes(size)} with {one}{' each' * (size > 1)} and engine {deployment.engine}"
    if deployment.node_selector:
        need += f" and labels {_labels(deployment)}"
    if not nodes:
        return f"{need}; no node is registered: start a node agent"
    verdicts: Counter[str] = Counter()
    fitting, most = 0, 0
    for node in nodes:
        unfit = _unfit(node, deployment, closed)
        if unfit is not None:
            verdicts[unfit] += 1
            continue
        most = max(most, capacity.free(node, deployment))
        if capacity.fits(node, deployment):
            fitting += 1
        else:
            verdicts["too full" if _offers(node, deployment) else _offers_too_little(deployment)] += 1
    found = f"of {counted_nodes(len(nodes))} {fitting} {'fits' if fitting == 1 else 'fit'}"
    lacking = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
    if verdicts["too full"] and gpus:
        lacking = lacking.replace("too full", f"too full with at most {most} free")
    if lacking:
        found += f" ({lacking})"
    if fitting >= size and against:
        return f"{need}; {found}; {against}"
    return f"{need}; {found}; {_remedy(deployment, verdicts, fitting)}"


def _unfit(node: Node, deployment: Deployment, closed: Mapping[str, str]) -> str | None:
    """What about `node` itself, not its room, keeps `deployment` off it."""
    if deployment.engine not in node.engines:
        return f"without engine {deployment.engine}"
    if any(node.labels.get(key) != value for key, value in deployment.node_selector.items()):
        return "without the labels"
    if node.draining:
        return "draining"
    return closed.get(node.id)


def _offers(node: Node, deployment: Deployment) -> bool:
    if deployment.gpus_per_node:
        return len(node.gpus) >= deployment.gpus_per_node
    return not node.gpus and node.cpu_slots > 0


def _offers_too_little(deployment: Deployment) -> str:
    gpus = deployment.gpus_per_node
    return (
        f"with fewer than {gpus} GPUs" if gpus else "with GPUs, which take no replica that asks for none, or no slots"
    )


def _remedy(deployment: Deployment, verdicts: Counter[str], fitting: int) -> str:
    missing = deployment.gang_size - fitting
    if missing <= 0 and deployment.gang_size == 1:
        return "no place on them keeps every limit of the facility"
    if missing <= 0:
        return "all rendezvous ports of their leaders are taken: widen rendezvous.ports"
    more = f"add {missing} such node{'s' * (missing > 1)}"
    if verdicts["too full"] or verdicts["draining"] or verdicts[JUST_BACK]:
        undo = ", undo a drain" if verdicts["draining"] else ""
        return f"{more}{undo} or scale a deployment down"
    if verdicts[UNLISTED]:
        return f"{more}, or write those that are there into the facility (`stoker plan apply`)"
    if verdicts["without the labels"]:
        return f"label {counted_nodes(missing)} {_labels(deployment)}, or change node_selector"
    if verdicts[f"without engine {deployment.engine}"]:
        return f"install {deployment.engine} on a node, or change the deployment's engine"
    return f"{more}, or change gpus_per_node"


def _labels(deployment: Deployment) -> str:
    return ",".join(f"{key}={value}" for key, value in sorted(deployment.node_selector.items()))
