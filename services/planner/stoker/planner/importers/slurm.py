"""Slurm's topology.conf, of the tree and the block plugin."""

from __future__ import annotations

import re
from collections import defaultdict

from stoker.common import yaml_file
from stoker.planner.core.facility.ranges import MOST_NAMES, BadRange, compressed, expand
from stoker.planner.facility_schema import FacilityFile
from stoker.planner.importers.part import Imported, Open, bounded, clean, sites, tree

# From the beginning of a word only: within one, each try would read to its end again.
_PAIR = re.compile(r"\b(\w+)\s*=\s*(\S+)")
_ASSUMED = "the format says no rates: cables of {rate:g} Gbit/s, oversubscription {over:g} at each switch"


def parse(text: str, source: str, left_open: Open) -> Imported:
    """Switches and cables of a tree, blocks as NVLink domains. Raises StokerError (BAD_FILE) with the line."""
    nodes_of: dict[str, list[str]] = {}
    switches_of: dict[str, list[str]] = {}
    blocks: defaultdict[str, list[str]] = defaultdict(list)
    total = 0
    for number, line in _lines(text):
        at = f"{source}:{number}"
        given = {key.lower(): value for key, value in _PAIR.findall(line)}
        if not given:
            raise yaml_file.bad(f"{at}: expected SwitchName=, BlockName= or BlockSizes=, found {line[:60]!r}")
        nodes, below = _names(given.get("nodes"), at), _names(given.get("switches"), at)
        total += len(nodes) + len(below) + 1
        bounded(total, source)
        if "switchname" in given:
            name = clean(given["switchname"], at)
            if name in nodes_of or name in switches_of:
                raise yaml_file.bad(f"{at}: switch {name} is described twice")
            if not nodes and not below:
                raise yaml_file.bad(f"{at}: switch {name} has neither Nodes nor Switches")
            if nodes:
                nodes_of[name] = nodes
            if below:
                switches_of[name] = below
        elif "blockname" in given:
            blocks[clean(given["blockname"], at)] += nodes
        elif "blocksizes" not in given:
            raise yaml_file.bad(f"{at}: expected SwitchName=, BlockName= or BlockSizes=, found {line[:60]!r}")
    if not nodes_of and not switches_of and not blocks:
        raise yaml_file.bad(f"{source}: describes no switch and no block")
    switches, links = tree(nodes_of, switches_of, source, left_open)
    every = [name for names in [*nodes_of.values(), *blocks.values()] for name in names]
    part = FacilityFile(
        sites=sites(every, left_open),
        switches=dict(switches),
        links=links,
        scale_up_domains={block: ",".join(compressed(names)) for block, names in blocks.items() if names},
    )
    notes = () if not switches else (_ASSUMED.format(rate=left_open.gbit_per_s, over=left_open.oversubscription),)
    return Imported(part, notes)


def _lines(text: str) -> list[tuple[int, str]]:
    """Lines with something in them, continued ones put together, each with the number of its first."""
    lines: list[tuple[int, str]] = []
    pending, began = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.split("#", 1)[0].rstrip()
        began = began or number
        if line.endswith("\\"):
            pending += line[:-1] + " "
            continue
        whole = (pending + line).strip()
        if whole:
            lines.append((began, whole))
        pending, began = "", 0
    if pending.strip():
        lines.append((began, pending.strip()))
    return lines


def _names(text: str | None, at: str) -> list[str]:
    if text is None:
        return []
    try:
        return [clean(name, at) for name in expand(text, MOST_NAMES)]
    except BadRange as error:
        raise yaml_file.bad(f"{at}: {error}") from error
