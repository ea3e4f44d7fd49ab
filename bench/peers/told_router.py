"""Stoker's router before static engines: told of its replicas directly, with no registry and no agents.

python -m bench.peers.told_router --model-dir DIR [--listen grpc=HOST:PORT]… [--worker FOLDER N COUNT] URL…
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from pathlib import Path

import uvloop

from stoker.api.registry.v1 import registry_pb2
from stoker.common import collecting
from stoker.common.config import load
from stoker.router.app import RouterApp
from stoker.router.config import RouterConfig
from stoker.router.workers.siblings import Siblings
from tests.support.router import replica, tell, tokenizer_of

SERVING = "told-router-serves"
"""Printed once it does."""
_CONTEXT = 131_072
_PREFILL_RATE = 5_000_000.0
"""Tokens/s: what an agent would measure of engines that answer 500 tokens in 0.1 ms. At the rate assumed of engines
not yet measured, the router would hold requests back until these had done what they never do."""


async def serve(own: list[str], model_dir: Path, urls: list[str], siblings: Siblings) -> None:
    """Serve until SIGTERM."""
    sha256, tokenizer = tokenizer_of(model_dir)
    settings = [
        *own,
        # What answers a canary with tokens from a list cannot be probed.
        "parity=false",
        "drain_s=1",
    ]
    app = RouterApp(load(RouterConfig, None, settings), siblings)
    app.tokenizers.add(sha256, tokenizer)
    await app.start()
    try:
        records = [
            replica(f"static-{number}", url, sha256=sha256, max_model_len=_CONTEXT) for number, url in enumerate(urls)
        ]
        tell(app, *records)
        now = app.router.clock()
        app.view.load(
            [
                registry_pb2.ReplicaLoad(
                    replica_id=record.replica_id, epoch=record.epoch, prefill_tokens_per_s=_PREFILL_RATE
                )
                for record in records
            ],
            now,
        )
        for record in records:
            app.view.proved(app.view.targets[record.replica_id], "ok")
        collecting.settle()  # as the service does
        print(SERVING, flush=True)
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await stop.wait()
    finally:
        await app.close()


def main() -> None:
    """Parse and serve."""
    parser = argparse.ArgumentParser(description="Stoker's router before static engines.")
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--listen", action="append", default=[], metavar="API=HOST:PORT", help="http, grpc …")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="further settings")
    parser.add_argument("--worker", nargs=3, metavar=("FOLDER", "N", "COUNT"), help="the N-th of several, from 0")
    parser.add_argument("urls", nargs="+")
    options = parser.parse_args()
    own = [*(f"listen.{each}" for each in options.listen), *options.set]
    siblings = Siblings.alone()
    if options.worker:
        folder, number, count = options.worker
        siblings = Siblings(Path(folder), int(number), int(count))
    uvloop.run(serve(own, options.model_dir, options.urls, siblings))


if __name__ == "__main__":
    main()
