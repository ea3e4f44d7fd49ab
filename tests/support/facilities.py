"""Small facility files for tests of the planner's loop."""

from __future__ import annotations

from collections.abc import Mapping

_HEAD = """\
name: hall
node_types:
  box: {gpu: h100-sxm, gpus: 4, height_u: 4, weight_kg: 50, max_kw: 5, idle_kw: 1, scale_up: node,
        numa: [0, 0, 1, 1], pcie_roots: [0, 0, 1, 1]}
sites:
  dc:
    feeds: {a: {kw: 1000}, b: {kw: 1000}}
    racks:
"""


def hall(racks: Mapping[str, str], *, rack_kw: float = 100.0) -> str:
    """Racks by name with a range of nodes each, "n[1-2]", each on two feeds that may carry `rack_kw`: boxes of 4
    GPUs that draw 1 kW when idle and 1 kW more for each busy GPU; two GPUs a PCIe root."""
    limit = f"kw: {rack_kw}, derating: 1"
    feeds = f"{{$rack-a: {{{limit}, parent: a}}, $rack-b: {{{limit}, parent: b}}}}"
    return _HEAD + "".join(
        f'      {rack}: {{feeds: {feeds}, nodes: {{"{nodes}": box}}}}\n' for rack, nodes in racks.items()
    )
