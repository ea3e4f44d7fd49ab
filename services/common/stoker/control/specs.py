"""What a replica runs, as a name: two specifications that differ in nothing that it would notice have the same."""

from __future__ import annotations

import hashlib

from stoker.api.common.v1 import common_pb2


def spec_key(spec: common_pb2.DeploymentSpec) -> str:
    """A name for what a replica runs: equal for specifications that differ in nothing but how many replicas there
    are, how that is found, and where they may be."""
    bare = common_pb2.DeploymentSpec()
    bare.CopyFrom(spec)
    bare.replicas = 0
    bare.ClearField("scaling")
    bare.ClearField("placement")
    return hashlib.sha256(bare.SerializeToString(deterministic=True)).hexdigest()[:16]
