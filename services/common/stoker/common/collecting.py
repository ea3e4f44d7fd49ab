"""How often a serving process looks for cyclic garbage."""

from __future__ import annotations

import gc

_YOUNG = 10_000
"""Objects made and not freed between two looks at the youngest; Python's own default is 700."""
_MIDDLE = 1
_OLD = 100
"""Looks at the younger between two looks at the next older; Python's own default is 10 and 10.

Nothing here waits for the collector: over 30,000 decisions it found no garbage at all. But it walks over what a
router remembers of requests, 280,000 objects with a hundred replicas, and the loop stands still meanwhile.
Measured so, the longest look was 21 ms (58 ms at 10 and 10), at the same share of CPU time, 1.6 %, and only
while memories fill; the one at everything, 100 ms, waits for two million new objects: some 200 MB, should there
be garbage one day. The block index is none of it: two million blocks are 700 objects, and freezing them once
more, after the first sync, gained nothing.
"""


def settle() -> None:
    """Leave what is there now out of all further looks: call it once, when all is set up.

    Modules, tokenizers and tables live as long as the process. To walk over them again and again cost a router an
    eighth of its CPU time, and stopped it for tens of milliseconds each time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)
