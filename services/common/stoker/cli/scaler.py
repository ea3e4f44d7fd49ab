"""`stoker scaler`: why a count is what it is, what another policy would make of it, and changing that."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import grpc
import typer
import yaml

from stoker.api.common.v1 import scaling_pb2
from stoker.api.registry.v1 import records_pb2
from stoker.api.scaler.v1 import scaler_pb2, scaler_pb2_grpc
from stoker.cli import deployment_file, scaler_report
from stoker.cli.addresses import Addresses, RegistryOption, ScalerOption, secured
from stoker.cli.fleet import Registries, explained
from stoker.cli.loop import run
from stoker.cli.output import Format, FormatOption, Output
from stoker.common import rpc
from stoker.common.errors import Code, InvalidRequest, NotFound, StokerError
from stoker.common.tls import Tls
from stoker.scaler.core.policy import Kind

R = TypeVar("R")

_CALL_S = 10.0
_NOTHING = yaml.ScalarNode("tag:yaml.org,2002:null", "")


app = typer.Typer(help="See why a deployment has as many replicas as it has; change how that is found.")

NameArgument = Annotated[str, typer.Argument(help="The deployment.", show_default=False)]
KindOption = Annotated[
    Kind | None, typer.Option("--policy", help="What finds the count. Other settings stay.", show_default=False)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="One setting, as in a deployment file's `scaling`: bounds.most=8, slo.ttft_s=0.5. Repeatable.",
        show_default=False,
    ),
]
FileOption = Annotated[
    Path | None,
    typer.Option("-f", "--file", help="YAML file with the whole policy: what stands under `scaling`."),
]


@app.command(epilog="Example: stoker scaler why tiny")
def why(
    deployment: NameArgument,
    samples: Annotated[int, typer.Option("--samples", min=1, max=1_000, help="Last samples to show.")] = 5,
    registry: RegistryOption = "",
    scaler: ScalerOption = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Show what was decided for a deployment, what would be now, and the signals and figures behind it."""
    request = scaler_pb2.WhyDeploymentRequest(deployment=deployment, samples=samples)
    answer = run(
        _ask(_scalers(scaler, registry), secured(scaler), lambda stub: stub.WhyDeployment(request, timeout=_CALL_S))
    )
    value = scaler_report.why_json(deployment, answer)
    Output(output).result(value, *scaler_report.why_tables(value))


@app.command("dry-run", epilog="Example: stoker scaler dry-run tiny --policy slo --set slo.ttft_s=0.5")
def dry_run(
    deployment: NameArgument,
    policy: KindOption = None,
    settings: SetOption = None,
    file: FileOption = None,
    registry: RegistryOption = "",
    scaler: ScalerOption = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Show what another policy would decide now, from all that is known; nothing is changed."""
    targets = _scalers(scaler, registry)
    tried = None if policy is None and not settings and file is None else _wanted(policy, settings or [], file)

    async def work() -> scaler_pb2.DryRunResponse:
        whole = None if tried is None else tried(await _present(registry, deployment))
        request = scaler_pb2.DryRunRequest(deployment=deployment, policy=whole)
        return await _ask(targets, secured(scaler), lambda stub: stub.DryRun(request, timeout=_CALL_S))

    value = scaler_report.dry_run_json(deployment, run(work()))
    Output(output).result(value, *scaler_report.dry_run_tables(value))


@app.command(epilog="Example: stoker scaler policy tiny --policy slo --set bounds.least=2 --set bounds.most=8")
def policy(
    deployment: NameArgument,
    kind: KindOption = None,
    settings: SetOption = None,
    file: FileOption = None,
    remove: Annotated[bool, typer.Option("--remove", help="The count is the specification's again.")] = False,
    registry: RegistryOption = "",
    scaler: ScalerOption = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Show how a deployment's count is found, defaults filled in; with options, change it."""
    out, targets, tls = Output(output), _scalers(scaler, registry), secured(scaler)
    changes = kind is not None or bool(settings) or file is not None
    if remove and changes:
        raise InvalidRequest.field("--remove", "cannot be combined with a policy: give one or the other")
    if not remove and not changes:
        request = scaler_pb2.WhyDeploymentRequest(deployment=deployment, samples=1, minutes=1)
        told = run(_ask(targets, tls, lambda stub: stub.WhyDeployment(request, timeout=_CALL_S)))
        shown = scaler_report.policy_json(told.policy)
        out.result({"deployment": deployment, "policy": shown}, *scaler_report.policy_lines(shown))
        return
    wanted = _wanted(kind, settings or [], file) if changes else None

    async def work() -> records_pb2.Deployment:
        present = await _present(registry, deployment)
        request = scaler_pb2.SetPolicyRequest(
            deployment=deployment,
            policy=wanted(present) if wanted is not None else None,
            expected_generation=present.generation,
        )
        return (await _ask(targets, tls, lambda stub: stub.SetPolicy(request, timeout=_CALL_S))).deployment

    written = run(work())
    shown = scaler_report.policy_json(written.spec.scaling)
    value = {"deployment": deployment, "generation": written.generation, "policy": shown}
    said = shown["kind"] if written.spec.HasField("scaling") else f"fixed at {written.spec.replicas}"
    out.result(value, f"{deployment}: {said}, generation {written.generation}; see `stoker scaler why {deployment}`")


@app.command(epilog='Example: stoker scaler pause tiny --note "incident 4711"')
def pause(
    deployment: NameArgument,
    note: Annotated[str, typer.Option("--note", help="Why, for people.")] = "",
    registry: RegistryOption = "",
    scaler: ScalerOption = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Let the count of a deployment stand as it is until it is resumed."""
    request = scaler_pb2.PauseRequest(deployment=deployment, note=note)
    run(_ask(_scalers(scaler, registry), secured(scaler), lambda stub: stub.Pause(request, timeout=_CALL_S)))
    value = {"deployment": deployment, "paused": True, "note": note}
    Output(output).result(value, f"{deployment}: paused; end it with `stoker scaler resume {deployment}`")


@app.command(epilog="Example: stoker scaler resume tiny")
def resume(
    deployment: NameArgument,
    registry: RegistryOption = "",
    scaler: ScalerOption = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Let the policy of a deployment decide again."""
    request = scaler_pb2.ResumeRequest(deployment=deployment)
    run(_ask(_scalers(scaler, registry), secured(scaler), lambda stub: stub.Resume(request, timeout=_CALL_S)))
    value = {"deployment": deployment, "paused": False}
    Output(output).result(value, f"{deployment}: resumed; its policy decides")


def _scalers(scaler: str, registry: str = "") -> tuple[str, ...]:
    return Addresses.find(registry, scaler=scaler).require_scalers()


async def _ask(
    targets: tuple[str, ...],
    tls: Tls | None,
    call: Callable[[scaler_pb2_grpc.ScalerServiceAsyncStub], Awaitable[R]],
) -> R:
    """The answer of the first scaler that gives one. Raises StokerError: what it refused, or of the last one."""
    failure: StokerError | None = None
    for target in targets:
        async with rpc.channel(target, tls) as channel:
            stub: scaler_pb2_grpc.ScalerServiceAsyncStub = scaler_pb2_grpc.ScalerServiceStub(channel)
            try:
                return await call(stub)
            except grpc.RpcError as error:
                failure = explained(target, error)
        if failure.code not in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED):
            break
    assert failure is not None  # noqa: S101 - there is at least one
    raise failure


async def _present(registry: str, deployment: str) -> records_pb2.Deployment:
    endpoints = Addresses.find(registry).require_registries()
    async with Registries(endpoints, secured(registry)) as registries:
        found = (await registries.fleet()).deployment(deployment)
    if found is None:
        raise NotFound(f"deployment {deployment!r} does not exist")
    return found


def _wanted(
    kind: Kind | None, settings: list[str], file: Path | None
) -> Callable[[records_pb2.Deployment], scaling_pb2.ScalingPolicy]:
    """What makes the wanted policy of the present one: a file replaces it whole, single settings change it."""
    whole = deployment_file.read_policy(file) if file is not None else None
    single = deployment_file.parse_policy(_nested(settings), "--set", lines=False) if settings else None

    def change(present: records_pb2.Deployment) -> scaling_pb2.ScalingPolicy:
        policy = scaling_pb2.ScalingPolicy()
        policy.CopyFrom(whole if whole is not None else present.spec.scaling)
        if single is not None:
            if single.schedules:
                del policy.schedules[:]
            policy.MergeFrom(single)
        if kind is not None:
            policy.kind = scaling_pb2.ScalingKind.Value(f"SCALING_KIND_{kind.name}")
        return policy

    return change


def _nested(settings: list[str]) -> str:
    """`bounds.most=8` and its like as the YAML of a policy file."""
    root: dict[str, Any] = {}
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals or not path:
            raise InvalidRequest.field("--set", f"{setting!r} must be NAME=VALUE, for example bounds.most=8")
        *parents, name = path.strip().split(".")
        place = root
        for parent in parents:
            inner = place.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise InvalidRequest.field("--set", f"{path}: {parent} has a value of its own already")
            place = inner
        try:
            place[name] = yaml.compose(text, Loader=yaml.SafeLoader) or _NOTHING
        except yaml.YAMLError:
            raise InvalidRequest.field("--set", f"{setting!r}: the value is no valid YAML") from None
    return yaml.serialize(_node(root))


def _node(value: dict[str, Any] | yaml.Node) -> yaml.Node:
    """Values stay as they were written: YAML's own reading makes 630 of 10:30."""
    if isinstance(value, yaml.Node):
        return value
    names = (yaml.ScalarNode("tag:yaml.org,2002:str", name) for name in value)
    return yaml.MappingNode("tag:yaml.org,2002:map", list(zip(names, map(_node, value.values()), strict=True)))
