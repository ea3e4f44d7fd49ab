"""How many replicas a deployment gets."""

from __future__ import annotations

from stoker.scaler.core.values import Deployment, Reason


def fixed(deployment: Deployment) -> tuple[int, Reason]:
    """The count its specification names."""
    return deployment.replicas, Reason.FIXED
