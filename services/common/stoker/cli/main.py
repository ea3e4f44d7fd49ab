"""`stoker`: the command line."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import signal
import sys
from itertools import pairwise
from typing import Annotated, Any

import typer

from stoker.cli import bench, doctor, errors, explain, fleet_verbs, plan, scaler, simulate, stack_verbs
from stoker.common import logs
from stoker.common.errors import StokerError

# Typer brings a Click of its own or uses the public one, by version: this is the one in use.
_UsageError: Any = typer.BadParameter.__bases__[0]

app = typer.Typer(
    name="stoker",
    help="Keep the caches hot: run, route, scale and inspect a fleet of vLLM replicas.",
    epilog="Exit status: 0 done, 1 failed, 2 bad usage or input, 3 unreachable, 4 not in time, 130 interrupted.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
stack_verbs.add_to(app)
fleet_verbs.add_to(app)
explain.add_to(app)
doctor.add_to(app)
app.add_typer(bench.app, name="bench")
simulate.add_to(app)
app.add_typer(scaler.app, name="scaler")
app.add_typer(plan.app, name="plan")


def _tell_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"stoker {importlib.metadata.version('stoker')}\n")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Show the version and end.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run one verb and end with its status. See `stoker.cli.errors` for the statuses."""
    sys.exit(_run(sys.argv[1:]))


def _run(arguments: list[str]) -> int:
    # Typer counts a trailing `-o json` only once it has parsed it; an error before that must know too.
    as_json = any(pair in (("-o", "json"), ("--output", "json")) for pair in pairwise(arguments))
    as_json = as_json or "--output=json" in arguments or "-ojson" in arguments
    try:
        logs.setup("stoker", os.environ.get("STOKER_LOG_LEVEL", "error"))
        status = int(app(args=arguments, prog_name="stoker", standalone_mode=False) or errors.OK)
        # Typer catches Ctrl-C itself and returns this.
        return _interrupted() if status == errors.INTERRUPTED else status
    except _UsageError as error:
        where = error.ctx.command_path if error.ctx is not None else "stoker"
        message = " ".join(error.format_message().split()) or "no command given"
        errors.Failure("USAGE", message, f"see `{where} --help`", errors.USAGE).show(as_json=as_json)
        return errors.USAGE
    except (typer.Abort, KeyboardInterrupt, asyncio.CancelledError):
        return _interrupted()
    except StokerError as error:
        failure = errors.Failure.of(error)
    except BrokenPipeError:  # `stoker status | head`
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:  # noqa: BLE001 - a user never sees a stack trace
        failure = errors.unexpected(error)
    failure.show(as_json=as_json)
    return failure.exit_code


def _interrupted() -> int:
    sys.stderr.write("interrupted; what was started here is stopped, what was asked of the fleet stands\n")
    return errors.INTERRUPTED


if __name__ == "__main__":
    main()
