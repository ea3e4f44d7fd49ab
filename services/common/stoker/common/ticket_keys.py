"""The file of ticket keys, followed as certificates are: read again every few seconds, taken once it is whole."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import structlog
from msgspec import Meta

from stoker.common.tickets import BadKeys, Keys, parse
from stoker.common.tls import POLL_S

log = structlog.get_logger(__name__)

_MAX_BYTES = 64 * 1024


@dataclass(frozen=True)
class TicketKeysConfig:
    """The keys that routers sign tickets with, and node agents check them by."""

    keys: Annotated[
        str, Meta(description="file of keys, `id hex` on each line, the first of which signs; empty for no tickets")
    ] = ""


class KeyFile:
    """Keys of a file; `keys` are those of now, None where no file is set."""

    def __init__(self, path: str, setting: str = "tickets.keys") -> None:
        """Reads the file. Raises BadKeys."""
        self._path = path
        self._setting = setting
        self._failing = False
        self.keys: Keys | None = self._read() if path else None

    def _read(self) -> Keys:
        try:
            with Path(self._path).open(encoding="ascii", errors="replace") as file:
                content = file.read(_MAX_BYTES)
        except OSError as error:
            raise BadKeys(
                f"{self._setting}: cannot read {self._path}: {error.strerror}; correct the path, or let the "
                "service's user read it (chgrp stoker, chmod 640)"
            ) from error
        return parse(self._setting, self._path, content)

    def look(self) -> None:
        """Read the file once more. What cannot be used is not taken: the keys in use stay."""
        try:
            found = self._read()
        except BadKeys as error:
            if not self._failing:
                log.error("tickets.keys_not_taken", setting=self._setting, error=error.message)
            self._failing = True
            return
        self._failing = False
        if found != self.keys:
            self.keys = found
            log.info("tickets.keys_taken", setting=self._setting, file=self._path, signs=found.first)

    async def follow(self) -> None:
        """Take what the file comes to hold, for ever."""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await asyncio.to_thread(self.look)
            except Exception:  # whoever stops looking keeps keys that should have gone
                log.exception("tickets.look_failed", setting=self._setting)


@contextlib.asynccontextmanager
async def following(path: str) -> AsyncIterator[KeyFile]:
    """The keys of a service, kept up to date while the block runs. Raises BadKeys."""
    file = KeyFile(path)
    task = asyncio.create_task(file.follow(), name="follow tickets.keys") if path else None
    try:
        yield file
    finally:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
