"""Small facility files for tests of the planner's loop."""

from __future__ import annotations

from collections.abc import Mapping

_HEAD = """\
name: hall
node_types:
  box: {{gpu: h100-sxm, gpus: {gpus}, height_u: 4, weight_kg: 50, max_kw: {kw}, idle_kw: 1, scale_up: node,
        numa: {halves}, pcie_roots: {halves}}}
sites:
  dc:
    feeds: {{a: {{kw: 1000}}, b: {{kw: 1000}}}}
    racks:
"""


def hall(racks: Mapping[str, str], *, rack_kw: float = 100.0, gpus: int = 4) -> str:
    """Racks by name with a range of nodes each, "n[1-2]", each on two feeds that may carry `rack_kw`: boxes that draw
    1 kW when idle and 1 kW more for each busy GPU, half of their GPUs on either PCIe root."""
    limit = f"kw: {rack_kw}, derating: 1"
    feeds = f"{{$rack-a: {{{limit}, parent: a}}, $rack-b: {{{limit}, parent: b}}}}"
    halves = [index * 2 // gpus for index in range(gpus)]
    return _HEAD.format(gpus=gpus, kw=1 + gpus, halves=halves) + "".join(
        f'      {rack}: {{feeds: {feeds}, nodes: {{"{nodes}": box}}}}\n' for rack, nodes in racks.items()
    )
