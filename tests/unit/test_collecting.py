"""What is set up is looked at no more."""

from __future__ import annotations

import subprocess
import sys

_SEEN = """
import gc
from stoker.common import collecting

kept = [[] for _ in range(1000)]
before = gc.get_threshold()
collecting.settle()
young = len(gc.get_objects())
kept.append([])
after = gc.get_threshold()
assert young < 100, young
assert any(each is kept[-1] for each in gc.get_objects())
assert after[0] > before[0] and after[1] < before[1] and after[2] > before[2], after
"""


def test_what_is_there_is_left_out_and_what_comes_later_is_not() -> None:
    # In a process of its own: it would hold for all other tests.
    done = subprocess.run([sys.executable, "-c", _SEEN], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
