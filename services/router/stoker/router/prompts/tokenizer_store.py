"""Tokenizers by the digest of their files, fetched from node agents."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import grpc
import structlog

from stoker.api.node.v1 import node_pb2, node_pb2_grpc
from stoker.common.backoff import Backoff
from stoker.common.errors import StokerError
from stoker.common.fingerprint import fingerprint
from stoker.router.fleet.pools import Target
from stoker.router.prompts.tokenizer import ModelTokenizer

log = structlog.get_logger(__name__)

_FETCH_S = 30.0
_MAX_BYTES = 256 * 1024 * 1024
_MAX_TOKENIZERS = 64
_BACKOFF = Backoff(first_s=0.5, max_s=15.0)


class WrongTokenizer(StokerError):
    """What an agent sent is not the tokenizer that it announced."""

    reason = "WRONG_TOKENIZER"


class TokenizerStore:
    """Keeps what was fetched in memory, and in `cache_dir` where given. Fetches in the background."""

    def __init__(self, channel: Callable[[str], grpc.aio.Channel], cache_dir: str, rng: random.Random) -> None:
        self._channel = channel
        self._cache_dir = Path(cache_dir) if cache_dir else None
        self._rng = rng
        self._ready: dict[str, ModelTokenizer] = {}
        self._fetches: dict[str, asyncio.Task[None]] = {}

    def get(self, sha256: str) -> ModelTokenizer | None:
        """The tokenizer with this digest, if it is here."""
        return self._ready.get(sha256)

    def add(self, sha256: str, tokenizer: ModelTokenizer) -> None:
        """Put a tokenizer in place; beyond the bound the oldest goes."""
        while len(self._ready) >= _MAX_TOKENIZERS:
            del self._ready[next(iter(self._ready))]
        self._ready[sha256] = tokenizer

    def want(self, target: Target) -> None:
        """Start to fetch a replica's tokenizer unless it is here or on its way."""
        sha256 = target.record.engine.tokenizer_sha256
        if sha256 and sha256 not in self._ready and sha256 not in self._fetches:
            self._fetches[sha256] = asyncio.create_task(self._obtain(sha256, target))

    async def close(self) -> None:
        """Stop all fetches."""
        for task in self._fetches.values():
            task.cancel()
        await asyncio.gather(*self._fetches.values(), return_exceptions=True)

    async def _obtain(self, sha256: str, target: Target) -> None:
        try:
            attempt = 0
            # Until the replica is gone: another one of the model starts a fetch of its own.
            while target.pool is not None and target.record.engine.tokenizer_sha256 == sha256:
                try:
                    files = await asyncio.to_thread(self._cached, sha256) or await self._fetch(target)
                    _require(sha256, files, target)
                    self.add(sha256, await asyncio.to_thread(ModelTokenizer, files))
                    await asyncio.to_thread(self._keep, sha256, files)
                except WrongTokenizer as error:
                    log.error("tokenizer.refused", replica=target.id, sha256=sha256[:12], error=error.message)
                except (StokerError, grpc.RpcError, TimeoutError) as error:
                    log.warning("tokenizer.fetch_failed", replica=target.id, sha256=sha256[:12], error=_text(error))
                else:
                    log.info("tokenizer.ready", replica=target.id, sha256=sha256[:12])
                    return
                await asyncio.sleep(_BACKOFF.delay_s(attempt, self._rng))
                attempt += 1
        finally:
            self._fetches.pop(sha256, None)

    async def _fetch(self, target: Target) -> dict[str, bytes]:
        stub = node_pb2_grpc.NodeServiceStub(self._channel(target.record.agent_endpoint))
        files: dict[str, bytearray] = {}
        size = 0
        async with asyncio.timeout(_FETCH_S):
            request = node_pb2.FetchTokenizerRequest(replica_id=target.record.replica_id)
            async for piece in stub.FetchTokenizer(request, timeout=_FETCH_S):
                size += len(piece.data)
                if size > _MAX_BYTES:
                    raise StokerError(
                        f"tokenizer files of {target.id} exceed {_MAX_BYTES} bytes", reason="BAD_TOKENIZER"
                    )
                files.setdefault(Path(piece.name).name, bytearray()).extend(piece.data)
        return {name: bytes(data) for name, data in files.items()}

    def _cached(self, sha256: str) -> dict[str, bytes] | None:
        folder = self._folder(sha256)
        if folder is None or not folder.is_dir():
            return None
        with contextlib.suppress(OSError):  # a cache that cannot be read is no cache
            files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
            if fingerprint(files) == sha256:
                return files
            log.error("tokenizer.cache_damaged", folder=str(folder), sha256=sha256[:12])
            shutil.rmtree(folder)
        return None

    def _keep(self, sha256: str, files: dict[str, bytes]) -> None:
        folder = self._folder(sha256)
        if folder is None or folder.exists():
            return
        work = folder.with_name(f".{folder.name}.{self._rng.getrandbits(32):08x}")
        with contextlib.suppress(OSError):  # a cache that cannot be written is no cache
            work.mkdir(parents=True)
            for name, data in files.items():
                (work / name).write_bytes(data)
            work.rename(folder)

    def _folder(self, sha256: str) -> Path | None:
        if self._cache_dir is None or not sha256.isalnum():
            return None
        return self._cache_dir / sha256


def _require(sha256: str, files: dict[str, bytes], target: Target) -> None:
    found = fingerprint(files)
    if found != sha256:
        raise WrongTokenizer(
            f"{target.record.agent_endpoint} sent files of {target.id} with fingerprint {found[:12] or 'none'}, but "
            f"announces {sha256[:12]}: the model's files changed under its engine, or the transfer is damaged; "
            "restart the replica where they changed"
        )


def _text(error: Exception) -> str:
    if isinstance(error, StokerError):
        return error.message
    return str(getattr(error, "details", lambda: None)() or error or type(error).__name__)
