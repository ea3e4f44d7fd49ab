"""What operators have deployed: who serves a model, how its answers are judged, and whether a request starts one."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import records_pb2
from stoker.scaler.core.policy import Kind, Policy, Slo
from stoker.scaler.policy_messages import policy_of

log = structlog.get_logger(__name__)

_DEFAULT_SLO = Slo()


@dataclass(frozen=True, slots=True)
class _Deployed:
    spec: common_pb2.DeploymentSpec
    slo: Slo
    wakes: bool
    """A request that waits has a replica started where there is none."""

    @classmethod
    def of(cls, record: records_pb2.Deployment) -> _Deployed:
        try:
            policy = policy_of(record.spec, paused=record.HasField("pause"))
        except ValueError as error:  # from a later release: its model is served all the same, but not woken
            log.error("router.policy_unreadable", deployment=record.spec.name, error=str(error))
            policy = Policy()
        sleeps = policy.kind is not Kind.FIXED and not policy.paused and policy.bounds.least == 0
        return cls(record.spec, policy.slo, sleeps and policy.bounds.most > 0)

    @property
    def models(self) -> tuple[str, ...]:
        """Names that can be asked for."""
        return self.spec.served_model_name or self.spec.name, *(each.name for each in self.spec.lora_adapters)


class Deployments:
    """All deployments, by name."""

    def __init__(self) -> None:
        self._deployed: dict[str, _Deployed] = {}
        self._by_model: dict[str, tuple[str, ...]] | None = None  # made anew when it is next asked for

    def put(self, record: records_pb2.Deployment) -> None:
        """A deployment came or changed."""
        self._deployed[record.spec.name] = _Deployed.of(record)
        self._by_model = None

    def remove(self, name: str) -> None:
        """A deployment went."""
        if self._deployed.pop(name, None) is not None:
            self._by_model = None

    def _serving(self) -> dict[str, tuple[str, ...]]:
        if self._by_model is None:
            serving: dict[str, list[str]] = {}
            for name, deployed in self._deployed.items():
                for model in deployed.models:
                    serving.setdefault(model, []).append(name)
            self._by_model = {model: tuple(sorted(names)) for model, names in serving.items()}
        return self._by_model

    def models(self) -> list[str]:
        """All names that can be asked for, whether anything serves them now or not."""
        return list(self._serving())

    def serving(self, model: str) -> tuple[str, ...]:
        """The deployments that serve a model or an adapter."""
        return self._serving().get(model, ())

    def wakes(self, model: str) -> bool:
        """Whether a request that waits for a model has a replica started where there is none."""
        return any(self._deployed[name].wakes for name in self.serving(model))

    def slo(self, name: str) -> Slo:
        """The times by which a deployment's answers are judged."""
        deployed = self._deployed.get(name)
        return _DEFAULT_SLO if deployed is None else deployed.slo

    def max_output_tokens(self, name: str) -> int:
        """What a deployment lets a request generate; 0 for as many as fit."""
        deployed = self._deployed.get(name)
        return 0 if deployed is None else deployed.spec.max_output_tokens
