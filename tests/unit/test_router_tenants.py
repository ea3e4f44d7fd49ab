"""Who asks, by what the request says of it, and what that tenant may ask for."""

from __future__ import annotations

import pytest

from stoker.common.config import ConfigError, load
from stoker.common.errors import Exhausted, InvalidRequest
from stoker.router.config import RouterConfig, TenantsConfig
from stoker.router.core import TenantLimits
from stoker.router.flights.tenants import Caller, Tenants


def tenants(**fields: object) -> Tenants:
    return Tenants(TenantsConfig(**fields), lambda: 0.0)  # type: ignore[arg-type]


def test_a_header_names_the_tenant_and_goes_before_the_key() -> None:
    headers = {"x-stoker-tenant": "search", "authorization": "Bearer sk-1"}
    assert tenants().caller(headers) == Caller("search", 0)


def test_keys_tell_tenants_apart_and_are_not_kept() -> None:
    one, two = (tenants().caller({"authorization": f"Bearer sk-{n}"}).tenant for n in (1, 2))
    assert one != two
    assert "sk-" not in one
    assert len(one) == 16
    assert tenants(by_api_key=False).caller({"authorization": "Bearer sk-1"}).tenant == ""


def test_a_header_that_is_switched_off_is_not_read() -> None:
    assert tenants(header="").caller({"x-stoker-tenant": "search"}) == Caller()


def test_the_header_may_be_written_as_one_likes() -> None:
    assert tenants(header="X-Team").caller({"x-team": "search"}).tenant == "search", "gRPC metadata is lower case"


@pytest.mark.parametrize("name", ["a b", "x" * 129, "naïve", "\n"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="printable"):
        tenants().caller({"x-stoker-tenant": name})


def test_a_priority_comes_from_the_header_or_the_request() -> None:
    assert tenants().caller({}, 7).priority == 7
    assert tenants().caller({"x-stoker-priority": "-3"}, 7).priority == -3
    assert tenants().caller({}, 10**9).priority == 100
    for text in ("high", "101", "1.5", ""):
        with pytest.raises(InvalidRequest, match="-100"):
            tenants().caller({"x-stoker-priority": text})


def test_limits_are_the_tenants_own_or_everybodys() -> None:
    config = load(
        RouterConfig,
        None,
        [
            "tenants.limits={requests_per_s: 1, burst_s: 1}",
            "tenants.named={big: {requests_per_s: 3, burst_s: 1, weight: 2}}",
        ],
    )
    assert config.tenants.named["big"] == TenantLimits(requests_per_s=3.0, burst_s=1.0, weight=2.0)
    here = Tenants(config.tenants, lambda: 0.0)
    for tenant, admitted in (("big", 3), ("small", 1), ("other", 1)):
        for _ in range(admitted):
            here.take(tenant, 10.0)
        with pytest.raises(Exhausted):
            here.take(tenant, 10.0)
    with pytest.raises(ConfigError, match="tokens_per_s"):
        load(RouterConfig, None, ["tenants.limits.tokens_per_s=-1"])
    assert (here.weight("big"), here.weight("small")) == (2.0, 1.0)
