"""How a failed verb ends: what is wrong, what to do next, and an exit status that scripts can trust."""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from stoker.common.errors import Code, StokerError

OK, FAILED, USAGE, UNREACHABLE, TIMED_OUT, INTERRUPTED = 0, 1, 2, 3, 4, 130

_EXITS = {
    Code.INVALID_ARGUMENT: USAGE,
    Code.UNAVAILABLE: UNREACHABLE,
    Code.DEADLINE_EXCEEDED: TIMED_OUT,
    Code.CANCELLED: INTERRUPTED,
}

_NEXT = {
    "NO_ADDRESS": "start a local stack with `stoker up`, or name the service by the option or the variable said",
    "NOT_FOUND": "look for the right name with `stoker status`",
    "START_FAILED": "mend what the log says, then try again; `stoker doctor` checks this machine",
    "HOME_UNUSABLE": "mend that, or set STOKER_HOME to a directory of yours with room in it",
    "STACK_RUNS": "use it, or stop it with `stoker down`",
    "NOT_READY_IN_TIME": "see what holds it up with `stoker status` and `stoker logs REPLICA`",
    "NOT_PLACED_IN_TIME": "add nodes or ask for less; `stoker status` (with --planner) says what is short",
    "DECISION_FORGOTTEN": 'take an id from a recent answer\'s x-request-id, or `stoker explain "PROMPT"`',
    "CRASH_LOOP": "mend what its log says (`stoker logs REPLICA`), then `stoker deploy` again",
    "BAD_FILE": "correct what is named and try again",
    "NOT_CONFIRMED": "answer y, or give --yes",
    "SCALED_BY_POLICY": "change its bounds (`stoker scaler policy DEPLOYMENT --set bounds.most=N`), "
    "or fix the count (`… --policy fixed`), then scale",
    "HOLDING": "try again in a few seconds; if it lasts, `stoker status` shows what is out of reach",
    "NOT_LEADER": "try again in a few seconds; another process has just taken over",
}
_NEXT_BY_CODE = {
    Code.NOT_FOUND: "look for what there is with `stoker status`",
    Code.UNAVAILABLE: "check that the service runs at that address: `stoker doctor`, `stoker status`",
    Code.DEADLINE_EXCEEDED: "try again; if it lasts, `stoker doctor` shows which part does not answer",
    Code.INVALID_ARGUMENT: "correct it and try again; --help shows an example",
    Code.UNIMPLEMENTED: "check the address; if it is right, install the same version of Stoker everywhere",
    Code.FAILED_PRECONDITION: "look at the present state with `stoker status`, then decide again",
}


@dataclass(frozen=True)
class Failure:
    """An error as the terminal shows it."""

    reason: str
    message: str
    next_step: str
    exit_code: int

    @classmethod
    def of(cls, error: StokerError) -> Failure:
        """The failure that an error means for a verb."""
        next_step = _NEXT.get(error.reason) or _NEXT_BY_CODE.get(error.code) or "run `stoker doctor`"
        return cls(error.reason, error.message, next_step, _EXITS.get(error.code, FAILED))

    def show(self, *, as_json: bool) -> None:
        """Write it to stderr."""
        if as_json:
            body = {"reason": self.reason, "message": self.message, "next": self.next_step}
            sys.stderr.write(json.dumps({"error": body, "exit_code": self.exit_code}, ensure_ascii=False) + "\n")
            return
        console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
        console.print(Text.assemble(("error: ", "bold red"), self.message))
        console.print(Text.assemble(("next:  ", "bold"), self.next_step))


def unexpected(error: BaseException) -> Failure:
    """A defect of ours: the trace goes to a file, a line to the user."""
    with tempfile.NamedTemporaryFile("w", prefix="stoker-error-", suffix=".txt", delete=False) as file:
        traceback.print_exception(error, file=file)
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return Failure(
        "INTERNAL",
        f"unexpected {type(error).__name__}: {first[:300]}",
        f"please report it with {Path(file.name)}",
        FAILED,
    )
