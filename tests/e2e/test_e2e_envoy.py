"""`stoker up --data-plane envoy`: real processes, tokens carried by a real Envoy."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.stack import Cli
from tests.support.waiting import eventually_blocking

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


def ask_if_routed(api: str) -> tuple[str, int] | None:
    """The same; None while the router has not heard of the replica."""
    try:
        return ask(api)
    except urllib.error.HTTPError as error:
        if error.code != 503:
            raise
        return None


def test_a_stack_with_envoy_in_front_serves(cli: Cli) -> None:
    up = cli.json("up", "--engine", "sim", "--replicas", "1", "--data-plane", "envoy")
    (api,) = up["endpoints"]["envoy"]
    assert api in up["requests"]["OpenAI HTTP"]
    replica, tokens = eventually_blocking(lambda: ask_if_routed(api), "Envoy routes to the replica", _ROUTED_S)
    assert (replica != "", tokens) == (True, 4)
