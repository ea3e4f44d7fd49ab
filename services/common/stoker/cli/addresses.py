"""Where the services are: flags, then environment, then the local stack that runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from stoker.common.addresses import host_and_port
from stoker.common.errors import Code, InvalidRequest, StokerError
from stoker.common.tls import Tls, from_environment
from stoker.local.stack import LocalStack
from stoker.local.state import Home, StackState

RegistryOption = Annotated[
    str,
    typer.Option(
        "--registry",
        envvar="STOKER_REGISTRY",
        help="Registries, host:port, several with commas. Default: the local stack's.",
        show_default=False,
    ),
]
PlannerOption = Annotated[
    str,
    typer.Option(
        "--planner",
        envvar="STOKER_PLANNER",
        help="Planners, host:port, several with commas: they know why a replica has no place. "
        "Default: the local stack's.",
        show_default=False,
    ),
]
RouterOption = Annotated[
    str,
    typer.Option(
        "--router",
        envvar="STOKER_ROUTER",
        help="Routers' gRPC addresses, host:port, several with commas. Default: the local stack's.",
        show_default=False,
    ),
]
ScalerOption = Annotated[
    str,
    typer.Option(
        "--scaler",
        envvar="STOKER_SCALER",
        help="Scalers, host:port, several with commas; any answers, leading or not. Default: the local stack's.",
        show_default=False,
    ),
]


@dataclass(frozen=True)
class Addresses:
    """Resolved addresses, host:port each."""

    registries: tuple[str, ...]
    routers: tuple[str, ...]
    local: StackState | None = None
    planners: tuple[str, ...] = ()
    scalers: tuple[str, ...] = ()
    elsewhere: bool = False
    """The user named registries, so that the local stack's services are not meant."""

    @classmethod
    def find(cls, registry: str = "", router: str = "", planner: str = "", scaler: str = "") -> Addresses:
        """From what the user named, and the local stack for the rest."""
        local = None if registry and router else LocalStack(Home.default()).state()
        registries = _split("--registry", registry) or (local.endpoints.registry if local else ())
        routers = _split("--router", router) or (local.endpoints.router if local and not registry else ())
        planners = _split("--planner", planner) or ((local.endpoints.planner,) if local and not registry else ())
        scalers = _split("--scaler", scaler) or ((local.endpoints.scaler,) if local and not registry else ())
        return cls(registries, routers, None if registry else local, planners, scalers, bool(registry))

    def require_registries(self) -> tuple[str, ...]:
        """The registries. Raises StokerError when none is known."""
        return self._require(self.registries, "registry", "--registry", "STOKER_REGISTRY")

    def require_routers(self) -> tuple[str, ...]:
        """The routers. Raises StokerError when none is known."""
        return self._require(self.routers, "router", "--router", "STOKER_ROUTER")

    def require_scalers(self) -> tuple[str, ...]:
        """The scalers. Raises StokerError when none is known."""
        return self._require(self.scalers, "scaler", "--scaler", "STOKER_SCALER")

    def require_planners(self) -> tuple[str, ...]:
        """The planners. Raises StokerError when none is known."""
        return self._require(self.planners, "planner", "--planner", "STOKER_PLANNER")

    def _require(self, found: tuple[str, ...], what: str, flag: str, variable: str) -> tuple[str, ...]:
        if not found:
            lost = LocalStack(home := Home.default()).lost()
            local = f"the stack in {home.path} has lost its supervisor" if lost else "no local stack runs"
            if self.elsewhere:
                local = "the registries named are not asked for one"
            raise StokerError(
                f"no {what} is known: {local}, and neither {flag} nor {variable} names one",
                reason="NO_ADDRESS",
                code=Code.UNAVAILABLE,
            )
        return found


def secured(named: str) -> Tls | None:
    """The certificates for addresses that the user named; the local stack, where none is, speaks plain text."""
    return from_environment() if named else None


def _split(flag: str, text: str) -> tuple[str, ...]:
    targets = tuple(part.strip() for part in text.split(",") if part.strip())
    for target in targets:
        found = host_and_port(target)
        if found is None or not all(found):
            raise InvalidRequest.field(flag, f"{target!r} must be host:port, for example 127.0.0.1:7310")
    return targets
