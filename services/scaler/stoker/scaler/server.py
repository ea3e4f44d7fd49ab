"""Between the scaler's core and the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc

from stoker.api.registry.v1 import records_pb2
from stoker.api.scaler.v1 import scaler_pb2, scaler_pb2_grpc
from stoker.common.errors import InvalidRequest, NotFound, Unavailable
from stoker.control.loop import ControlLoop
from stoker.registry.client import FleetWatch, RegistryClient
from stoker.registry.core import scaling, validation
from stoker.registry.core.validation import Limits
from stoker.scaler.core.policy import Policy
from stoker.scaler.core.signals import Capacity, Minute, Sample, Startup
from stoker.scaler.decision_messages import desired_record
from stoker.scaler.persisted import timestamp
from stoker.scaler.policy_messages import message_of, policy_from
from stoker.scaler.rounds import ScalerRound

ROLE = "scaler"
SERVICE = "stoker.api.scaler.v1.ScalerService"

_SAMPLES, _MOST_SAMPLES = 30, 1_000
_MINUTES, _MOST_MINUTES = 60, 10_080
_SAMPLE_FIELDS = tuple(
    field.name for field in scaler_pb2.Sample.DESCRIPTOR.fields if field.name not in ("at", "ready", "starting")
)

Context = grpc.aio.ServicerContext[Any, Any]


class ScalerServicer(scaler_pb2_grpc.ScalerServiceServicer):
    """Tells what was decided and why, and what would be; passes operators' wishes on to the registry.

    A standby answers as the leader does: it hears the same signals.
    """

    def __init__(self, loop: ControlLoop, watch: FleetWatch, round_: ScalerRound, client: RegistryClient) -> None:
        self._loop = loop
        self._watch = watch
        self._view = watch.view
        self._round = round_
        self._client = client

    async def GetScalerStatus(  # noqa: N802
        self, request: scaler_pb2.GetScalerStatusRequest, context: Context
    ) -> scaler_pb2.GetScalerStatusResponse:
        """The status; `decisions` are the persisted ones, whoever decided them."""
        return scaler_pb2.GetScalerStatusResponse(
            leading=self._loop.leading,
            leader=self._view.leaders.get(ROLE),
            decisions=[record for _, record in sorted(self._view.desired.items())],
        )

    async def WhyDeployment(  # noqa: N802
        self, request: scaler_pb2.WhyDeploymentRequest, context: Context
    ) -> scaler_pb2.WhyDeploymentResponse:
        """All that is known of one deployment's count."""
        validation.require(validation.name("deployment", request.deployment))
        samples = _bounded("samples", request.samples or _SAMPLES, _MOST_SAMPLES)
        minutes = _bounded("minutes", request.minutes or _MINUTES, _MOST_MINUTES)
        name, deployment = request.deployment, self._deployment(request.deployment)
        held = self._doubt()
        now = None if held else await self._decision(name, None)
        watching, clock = self._round.watching, asyncio.get_running_loop().time()
        watching.catch_up(clock)
        if name not in watching.memories:
            raise NotFound(f"deployment {name!r} was deleted meanwhile")
        memory, policy, offset = watching.memories[name], watching.policies[name], watching.wall(clock) - clock
        return scaler_pb2.WhyDeploymentResponse(
            standing=self._view.desired.get(name),
            now=now,
            held=held,
            policy=message_of(policy),
            pause=deployment.pause if deployment.HasField("pause") else None,
            measured=measured_message(memory.measured.capacity, watching.starts.startup(name)),
            samples=[sample_message(sample, offset) for sample in list(memory.samples)[-samples:]],
            minutes=[minute_message(minute) for minute in memory.minutes.kept[-minutes:]],
            group=self._group(name, policy),
        )

    async def DryRun(  # noqa: N802
        self, request: scaler_pb2.DryRunRequest, context: Context
    ) -> scaler_pb2.DryRunResponse:
        """What a policy would decide."""
        validation.require(validation.name("deployment", request.deployment))
        validation.require(scaling.policy("policy", request.policy, Limits()))
        name, deployment = request.deployment, self._deployment(request.deployment)
        tried = request.policy if request.HasField("policy") else deployment.spec.scaling
        if held := self._doubt():
            raise Unavailable(f"nothing can be decided now: {held}", reason="HOLDING", retry_after_s=2.0)
        policy = policy_from(tried, paused=deployment.HasField("pause"))
        return scaler_pb2.DryRunResponse(
            decision=await self._decision(name, policy),
            standing=self._view.desired.get(name),
            policy=message_of(policy),
        )

    async def SetPolicy(  # noqa: N802
        self, request: scaler_pb2.SetPolicyRequest, context: Context
    ) -> scaler_pb2.SetPolicyResponse:
        """Change how a count is found."""
        written = await self._client.set_scaling_policy(
            request.deployment,
            request.policy if request.HasField("policy") else None,
            expected_generation=request.expected_generation if request.HasField("expected_generation") else None,
        )
        return scaler_pb2.SetPolicyResponse(deployment=written)

    async def Pause(  # noqa: N802
        self, request: scaler_pb2.PauseRequest, context: Context
    ) -> scaler_pb2.PauseResponse:
        """Let a count stand."""
        written = await self._client.pause_scaling(request.deployment, note=request.note)
        return scaler_pb2.PauseResponse(deployment=written)

    async def Resume(  # noqa: N802
        self, request: scaler_pb2.ResumeRequest, context: Context
    ) -> scaler_pb2.ResumeResponse:
        """End a pause."""
        written = await self._client.pause_scaling(request.deployment, resume=True)
        return scaler_pb2.ResumeResponse(deployment=written)

    def _deployment(self, name: str) -> records_pb2.Deployment:
        if not self._watch.synced.is_set():
            raise Unavailable(
                "this scaler has not heard from any registry yet", reason="NOT_READY", retry_after_s=1.0
            )
        found = self._view.deployments.get(name)
        if found is None:
            raise NotFound(f"deployment {name!r} does not exist; `stoker status` lists the deployments")
        return found

    def _doubt(self) -> str:
        """Why nothing can be decided on what is known here; empty where something can."""
        if self._loop.holding:
            return self._loop.holding
        return (
            "no registry vouches for the view: etcd or all registries are out of reach" if self._watch.stale else ""
        )

    async def _decision(self, name: str, policy: Policy | None) -> records_pb2.Desired:
        now = asyncio.get_running_loop().time()
        decisions = await self._round.decided(now, None if policy is None else {name: policy})
        known = policy or self._round.watching.policies.get(name)
        paused = known is not None and known.paused
        for decision, desired in zip(decisions.made, decisions.desired, strict=True):
            if decision.deployment == name:
                return desired_record(desired, decision, None, paused=paused)
        raise NotFound(f"deployment {name!r} was deleted meanwhile")

    def _group(self, name: str, policy: Policy) -> list[str]:
        policies = self._round.watching.policies
        return sorted(n for n, p in policies.items() if policy.group and p.group == policy.group) or [name]


def sample_message(sample: Sample, offset: float) -> scaler_pb2.Sample:
    """A sample; `offset` is the wall clock's second at monotonic zero."""
    message = scaler_pb2.Sample(
        at=timestamp(sample.at + offset), ready=round(sample.ready), starting=round(sample.starting)
    )
    _fill(message, sample, _SAMPLE_FIELDS)
    return message


def minute_message(minute: Minute) -> scaler_pb2.Minute:
    """A minute."""
    return scaler_pb2.Minute(
        at=timestamp(minute.at),
        arrivals_per_s=minute.arrivals_per_s,
        prefill_tokens_per_s=minute.prefill_tokens_per_s,
        decode_tokens_per_s=minute.decode_tokens_per_s,
        hit_rate=minute.hit_rate,
    )


def measured_message(capacity: Capacity, startup: Startup) -> scaler_pb2.Measured:
    """What was measured so far."""
    message = scaler_pb2.Measured(startup_p50_s=startup.p50_s, startup_p95_s=startup.p95_s)
    _fill(message, capacity, ("prefill_tokens_per_s", "step_s", "sequence_s", "kv_tokens", "max_seqs"))
    return message


def _fill(message: Any, values: Any, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(values, name)
        if value is not None:
            setattr(message, name, value)


def _bounded(field: str, value: int, most: int) -> int:
    if value > most:
        raise InvalidRequest.field(field, f"{value} is too many; at most {most}")
    return value
