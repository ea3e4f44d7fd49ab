"""host:port, as people write it."""

from __future__ import annotations

import asyncio

import pytest

from stoker.cli.addresses import Addresses
from stoker.common import metrics
from stoker.common.addresses import host_and_port
from stoker.common.errors import InvalidRequest, StokerError
from stoker.router.http.listening import listen

NO_PORTS = ["", "reg-a", "reg-a:", "reg-a:x", "reg-a:-1", "reg-a:65536", "reg-a:²", "reg-a:" + "9" * 5_000]


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("10.0.0.7:7310", ("10.0.0.7", 7310)),
        ("[::1]:0", ("::1", 0)),
        (":7310", ("", 7310)),
        ("reg-a:65535", ("reg-a", 65_535)),
    ],
)
def test_an_address_is_split(address: str, found: tuple[str, int]) -> None:
    assert host_and_port(address) == found


@pytest.mark.parametrize("address", NO_PORTS)
def test_anything_else_is_none(address: str) -> None:
    assert host_and_port(address) is None


@pytest.mark.parametrize("address", ["reg-a:²", ":7310", "reg-a:0"])
def test_an_option_that_is_none_is_named(address: str) -> None:
    with pytest.raises(InvalidRequest, match=r"--registry: .*must be host:port"):
        Addresses.find(registry=address, router="router:7320")


@pytest.mark.parametrize("address", [*NO_PORTS, ":7381"])
async def test_a_router_that_cannot_listen_names_the_setting(address: str) -> None:
    with pytest.raises(StokerError, match=r"listen.ext_authz is .*; write host:port, for example 127.0.0.1:7381"):
        await listen("listen.ext_authz", address, asyncio.Protocol, example="127.0.0.1:7381")


@pytest.mark.parametrize("address", [address for address in NO_PORTS if address])
def test_metrics_without_an_address_name_the_setting(address: str) -> None:
    with pytest.raises(StokerError, match="metrics_listen is ") as caught, metrics.exposed(address):
        pass
    assert caught.value.reason == "BAD_CONFIG"
