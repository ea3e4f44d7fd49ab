"""`stoker up --data-plane envoy`: real processes, tokens carried by a real Envoy."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.stack import Cli

pytestmark = pytest.mark.e2e

_ROUTED_S = 30.0


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    command = Cli(tmp_path / "home")
    yield command
    command.run("down", timeout_s=90)
    assert command.left() == []


def ask(api: str) -> tuple[str, int]:
    """The replica that answered, and how many tokens it gave."""
    body = json.dumps({"model": "tiny", "prompt": "Once upon a time", "max_tokens": 4}).encode()
    request = urllib.request.Request(  # noqa: S310
        f"{api}/completions", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
        return answer.headers["x-stoker-replica"], json.load(answer)["usage"]["completion_tokens"]


def routed(api: str) -> tuple[str, int]:
    """The same, once the router has heard of the replica."""
    deadline = time.monotonic() + _ROUTED_S
    while True:
        try:
            return ask(api)
        except urllib.error.HTTPError as error:
            if error.code != 503 or time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def test_a_stack_with_envoy_in_front_serves(cli: Cli) -> None:
    up = cli.json("up", "--engine", "sim", "--replicas", "1", "--data-plane", "envoy")
    (api,) = up["endpoints"]["envoy"]
    assert api in up["requests"]["OpenAI HTTP"]
    replica, tokens = routed(api)
    assert (replica != "", tokens) == (True, 4)
