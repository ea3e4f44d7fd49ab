"""What other tools know of a facility, as parts of a facility file.

Each reader takes a text and what the format leaves open, and yields a part that a facility file includes. None of
them trusts its input: sizes are bounded, shapes checked, names cleaned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from stoker.common import yaml_file
from stoker.planner.facility_file import MOST_BYTES
from stoker.planner.importers import lldp, netbox, nvidia_topo, slurm, topograph
from stoker.planner.importers.part import Imported, Open, joined

Reader = Callable[[str, str, Open], Imported]

FORMATS: dict[str, Reader] = {
    "topograph": topograph.parse,
    "slurm": slurm.parse,
    "netbox": netbox.parse,
    "nvidia-topo": nvidia_topo.parse,
    "lldp": lldp.parse,
}


def read(form: str, paths: Sequence[Path], left_open: Open) -> Imported:
    """The part of a facility in files of that format, a key of `FORMATS`; of LLDP and nvidia-smi a file a host.

    Raises StokerError (BAD_FILE).
    """
    return joined([FORMATS[form](yaml_file.text(path, MOST_BYTES), str(path), left_open) for path in paths])
