"""A router in the test's own process, before engines of its own, fed directly: no registry, no agent."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.common.config import load
from stoker.common.fingerprint import fingerprint
from stoker.node_agent import tokenizer_files
from stoker.router.app import RouterApp
from stoker.router.config import RouterConfig
from stoker.router.prompts.tokenizer import ModelTokenizer
from stoker.router.workers.siblings import Siblings

QUICK = ("checks.interval_s=0.2", "checks.timeout_s=1", "drain_s=5")


def fresh_tokenizer_of(model: Path) -> tuple[str, ModelTokenizer]:
    """A model directory's tokenizer, and its fingerprint as an agent would give it."""
    files = {name: (model / name).read_bytes() for name in tokenizer_files.NAMES if (model / name).is_file()}
    return fingerprint(files), ModelTokenizer(files)


@functools.cache
def tokenizer_of(model: Path) -> tuple[str, ModelTokenizer]:
    """The same for all tests, which may have it remember texts: it takes a quarter of a second to build."""
    return fresh_tokenizer_of(model)


def replica(
    replica_id: str,
    url: str,
    *,
    models: Sequence[str] = ("tiny",),
    sha256: str = "",
    state: records_pb2.State.ValueType = records_pb2.STATE_READY,
    epoch: int = 1,
    agent: str = "",
    max_model_len: int = 16384,
    block_size: int = 32,
) -> records_pb2.Replica:
    """A replica's record, as a registry would tell it."""
    return records_pb2.Replica(
        replica_id=replica_id,
        deployment="tiny",
        state=state,
        epoch=epoch,
        node_id=f"node-of-{replica_id}",
        agent_endpoint=agent,
        engine=records_pb2.EngineInfo(
            http_url=url,
            model_names=models,
            block_size=block_size,
            total_blocks=300,
            max_model_len=max_model_len,
            tokenizer_sha256=sha256,
            kind="sim",
        ),
    )


@contextlib.asynccontextmanager
async def running_router(*settings: str) -> AsyncIterator[RouterApp]:
    """A router that listens, knows nothing, and watches nobody."""
    ports = ["listen.grpc=127.0.0.1:0", "listen.http=127.0.0.1:0"]
    app = RouterApp(load(RouterConfig, None, [*ports, *QUICK, *settings]), Siblings.alone())
    await app.start()
    try:
        yield app
    finally:
        await app.close()


def tell(app: RouterApp, *replicas: records_pb2.Replica, removed: Sequence[str] = ()) -> None:
    """Tell a router of replicas, as a registry's snapshot would."""
    app.view.records(
        registry_pb2.Records(replicas=replicas),
        registry_pb2.Removals(replicas=removed),
        now=app.router.clock(),
        snapshot=True,
    )
    app.fleet_changed()
