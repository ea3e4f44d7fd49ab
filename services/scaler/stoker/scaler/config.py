"""What an operator can set for a scaler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from stoker.common.tls import TlsConfig
from stoker.control.config import LoopConfig


@dataclass(frozen=True)
class ScalerConfig:
    """Settings of one scaler process."""

    listen: Annotated[str, Meta(description="host:port of the gRPC server; port 0 takes a free one")] = (
        "127.0.0.1:7340"
    )
    metrics_listen: Annotated[str, Meta(description="host:port of /metrics; empty for none")] = ""
    registries: Annotated[
        tuple[str, ...], Meta(description="host:port of every registry; one that answers is enough", min_length=1)
    ] = ("127.0.0.1:7310",)
    load_fresh_s: Annotated[
        float, Meta(description="age at which a load report no longer counts as known, seconds", gt=0)
    ] = 10.0
    sample_s: Annotated[
        float, Meta(description="time between two samples of a deployment's signals, seconds", ge=0.5, le=10)
    ] = 2.0
    history_s: Annotated[
        float, Meta(description="least time between two writes of what is kept of a deployment, seconds", ge=10)
    ] = 60.0
    warm_s: Annotated[
        float,
        Meta(description="prefill that each replica that stays may spend on prompts of those that go, seconds", ge=0),
    ] = 10.0
    tls: TlsConfig = field(default_factory=TlsConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
