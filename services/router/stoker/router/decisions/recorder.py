"""Writes decisions and how they ended to a file, in a thread of its own: a slow or full disk costs records, not time.

The event loop appends to a bounded queue and goes on. What does not fit there, or cannot be written, is dropped and
counted in `stoker_router_records_total`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from stoker.router import core, metrics
from stoker.router.config import RecordConfig
from stoker.router.decisions.decided import Decided
from stoker.router.decisions.records import Record, encoded, packed, tenant_tag

log = structlog.get_logger(__name__)

_PERIOD_S = 0.1
_BATCH = 256
_RETRY_S = (1.0, 30.0)
_LIMIT_BYTES = 32 * 1024 * 1024
_KEY_BYTES = 32  # of a key that waits, as a number


@dataclass(slots=True)
class Ended:
    """How one try of a request went. Times by the router's clock."""

    decided: Decided
    replica: core.Replica | None
    outcome: core.Outcome
    at: float
    first_token_at: float | None = None
    cached_tokens: int | None = None
    generated_tokens: int | None = None


class Recorder:
    """Records what it is told, as long as it can."""

    def __init__(self, config: RecordConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = _RotatingFile(Path(config.path), config.max_bytes, config.files)
        self._limit = config.queue
        self._queue: deque[tuple[Ended, int]] = deque()
        self._told_bytes = 0  # counted by the loop alone
        self._taken_bytes = 0  # counted by the thread alone
        self._epoch = time.time() - clock()
        self._secret = secrets.token_bytes(16)
        self._stopping = threading.Event()
        self._odd_seen = False
        self._failing_since: float | None = None
        self._pause_s, self._again_at = _RETRY_S[0], 0.0
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def tell(self, ended: Ended) -> None:
        """Take a record, or drop it where too many wait. Never blocks."""
        size = 512 + _KEY_BYTES * len(ended.decided.plan.request.keys)
        if len(self._queue) >= self._limit or self._told_bytes - self._taken_bytes + size > _LIMIT_BYTES:
            metrics.of(metrics.RECORDS, "queue_full").inc()
            return
        self._told_bytes += size
        self._queue.append((ended, size))

    def close(self, timeout_s: float = 2.0) -> bool:
        """Write what waits and end, within `timeout_s`; whether that was enough."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            last = self._stopping.wait(_PERIOD_S)
            while self._queue:
                self._write_some()
            if last:
                self._file.close()
                return

    def _write_some(self) -> None:
        lines: list[bytes] = []
        while self._queue and len(lines) < _BATCH:
            ended, size = self._queue.popleft()
            self._taken_bytes += size
            try:
                lines.append(encoded(self._record(ended)))
            except Exception as error:  # noqa: BLE001 - one odd request must not end the recording
                metrics.of(metrics.RECORDS, "write_failed").inc()
                if not self._odd_seen:  # once: at a thousand a second the log would be the next to fill the disk
                    self._odd_seen = True
                    log.error("record.unwritable", error=repr(error))
        now = time.monotonic()
        if self._failing_since is not None and now < self._again_at:
            metrics.of(metrics.RECORDS, "write_failed").inc(len(lines))
            return
        try:
            self._file.write(lines)
        except OSError as error:
            metrics.of(metrics.RECORDS, "write_failed").inc(len(lines))
            self._failed(error, now)
        else:
            metrics.of(metrics.RECORDS, "written").inc(len(lines))
            if self._failing_since is not None:
                log.info(
                    "record.writes_again", path=str(self._file.path), after_s=round(now - self._failing_since, 1)
                )
            self._failing_since, self._pause_s = None, _RETRY_S[0]

    def _failed(self, error: OSError, now: float) -> None:
        if self._failing_since is None:
            self._failing_since = now
            log.warning("record.cannot_write", path=str(self._file.path), error=error.strerror or str(error))
        self._again_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _RETRY_S[1])

    def _record(self, ended: Ended) -> Record:
        decided, request, since = ended.decided, ended.decided.plan.request, ended.decided.since
        decision, replica = decided.decision, ended.replica
        return Record(
            at=round(self._epoch + since, 6),
            model=decided.plan.pool.model,
            replica=decision.replica,
            reason=decision.reason.value,
            prompt_tokens=request.prompt_tokens,
            block_size=request.block_size,
            keys=packed(request.keys),
            adapter=request.adapter,
            policy=decided.plan.policy,
            source=decided.plan.source,
            output_tokens=request.output_tokens,
            tenant=tenant_tag(request.tenant, self._secret),
            priority=request.priority,
            weight=request.weight,
            session=request.session,
            predicted_tokens=decision.cached_tokens,
            candidates=decision.considered,
            cost_s=decision.cost,
            waited_s=round(decided.at - since, 6),
            attempt=decided.attempt,
            outcome=ended.outcome.value,
            ttft_s=None if ended.first_token_at is None else round(ended.first_token_at - since, 6),
            took_s=round(ended.at - since, 6),
            cached_tokens=ended.cached_tokens,
            generated_tokens=ended.generated_tokens,
            kv_blocks=replica.kv_blocks if replica is not None else 0,
            prefill_rate=replica.prefill_rate if replica is not None else None,
        )


class _RotatingFile:
    """PATH, and before it PATH.1, PATH.2 …: each of at most so many bytes, and at most so many files."""

    def __init__(self, path: Path, max_bytes: int, files: int) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._files = files
        self._fd: int | None = None
        self._size = 0

    def write(self, lines: list[bytes]) -> None:
        """Append whole lines. Raises OSError; then what was written of them is taken back."""
        piece: list[bytes] = []
        size = 0
        for line in lines:
            if self._size + size + len(line) > self._max_bytes and self._size + size:
                self._append(b"".join(piece))
                piece, size = [], 0
                self._rotate()
            piece.append(line)
            size += len(line)
        self._append(b"".join(piece))

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _append(self, data: bytes) -> None:
        if self._fd is None:
            self._open()
        assert self._fd is not None  # noqa: S101
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            self.close()
            raise
        self._size += len(data)

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        fd = os.open(self.path, flags, 0o600)  # whoever reads it can test whether a prompt was asked
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":  # the last writer was killed in the middle of a line
                os.write(fd, b"\n")
                size += 1
        except BlockingIOError:
            os.close(fd)
            raise OSError(None, "another process writes there; give each router a record.path of its own") from None
        except OSError:
            os.close(fd)
            raise
        self._fd, self._size = fd, size

    def _rotate(self) -> None:
        self.close()
        for number in range(self._files - 1, 0, -1):
            older = self._numbered(number - 1)
            if older.exists():
                older.replace(self._numbered(number))
        if self._files == 1:
            self.path.unlink(missing_ok=True)
        self._size = 0

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}") if number else self.path
