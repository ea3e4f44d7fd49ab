"""How often a serving process looks for cyclic garbage."""

from __future__ import annotations

import gc

_YOUNG = 10_000
"""Objects made and not freed between two looks at the youngest; Python's own default is 700."""


def settle() -> None:
    """Leave what is there now out of all further looks: call it once, when all is set up.

    Modules, tokenizers and tables live as long as the process. To walk over them again and again cost a router an
    eighth of its CPU time, and stopped it for tens of milliseconds each time.
    """
    gc.collect()
    gc.freeze()
    _, middle, old = gc.get_threshold()
    gc.set_threshold(_YOUNG, middle, old)
