"""Planning: threads for long prompts, bytes where there are no tokens, and the alarm when digests stay silent."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.common.blocks import block_keys, root_key
from stoker.common.errors import InvalidRequest
from stoker.router import core
from stoker.router.fleet.view import View
from stoker.router.flights.confirm import Confirmations
from stoker.router.prompts.plan import Plan, Planner
from stoker.router.prompts.prompt import COMPLETIONS, TOKENIZE, read
from stoker.router.prompts.render import Conversation
from stoker.router.prompts.segments import TooMuchNew
from stoker.router.prompts.tokenizer_store import TokenizerStore
from tests.support.router import replica


class Words:
    """A tokenizer of a word a token, that remembers where it ran."""

    max_chars_per_token = 8

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.seen: set[str] = set()

    def encode(self, text: str, *, add_special_tokens: bool = True, most_new: int | None = None) -> list[int]:
        if most_new is not None and len(text) > most_new and text not in self.seen:
            raise TooMuchNew
        self.seen.add(text)
        self.threads.append(threading.current_thread().name)
        return [len(word) for word in text.split()]

    def render(self, conversation: Conversation) -> str:
        raise AssertionError("no chat here")


class Bench:
    """A planner with its view."""

    def __init__(
        self, executor: ThreadPoolExecutor, tokenizer: Words | None = None, patience_s: float = 10.0
    ) -> None:
        self.tokenizer = tokenizer or Words()
        store = TokenizerStore(lambda _: None, "", random.Random(0))  # type: ignore[arg-type, return-value]
        store.add("sha", self.tokenizer)  # type: ignore[arg-type]
        self.planner = Planner(store, executor, inline_bytes=1000, patience_s=patience_s)
        self.view = View(core.RoutingConfig(), core.HealthConfig())
        self.announce("sha")

    def announce(self, sha256: str) -> None:
        record = replica("a", "http://a", sha256=sha256, block_size=4)
        self.view.records(registry_pb2.Records(replicas=[record]), now=0.0, snapshot=True)

    async def plan(self, policy: str = "stoker", **body: Any) -> Plan:
        body = {"model": "tiny", **body}
        pool, adapter = self.view.resolve("tiny")
        return await self.planner.plan(read(COMPLETIONS, body, str(body).encode()), pool, adapter, policy)


@pytest.fixture
def bench() -> Iterator[Bench]:
    with ThreadPoolExecutor(1, thread_name_prefix="tokenize") as executor:
        yield Bench(executor)


async def test_no_request_looks_like_load_without_bound(bench: Bench) -> None:
    plan = await bench.plan(prompt="a b", n=10**30)
    assert plan.request.output_tokens < 2**32


async def test_no_guess_is_longer_than_a_prompt_can_be(bench: Bench) -> None:
    (pool,) = bench.view.pools.values()
    huge = [[1, "x"]] * pool.max_model_len
    for policy in ("stoker", "round_robin"):
        plan = await bench.plan(policy, prompt=huge)
        assert plan.tokens is None
        assert plan.request.prompt_tokens == pool.max_model_len
        assert len(plan.request.keys) <= pool.max_model_len // pool.block_size


async def test_a_text_that_shall_be_cut_is_tokenized_only_up_to_a_bound(bench: Bench) -> None:
    for pool in bench.view.pools.values():
        assert pool.max_model_len > 0
        most = 4 * pool.max_model_len * Words.max_chars_per_token
    assert (await bench.plan(prompt="a" * most, truncate_prompt_tokens=4)).source == "tokens"
    assert (await bench.plan(prompt="a" * (most + 1), truncate_prompt_tokens=4)).source == "bytes"


async def test_a_long_prompt_does_not_wait_behind_huge_ones_for_ever() -> None:
    free = threading.Event()

    class Busy(Words):
        def encode(self, text: str, *, add_special_tokens: bool = True, most_new: int | None = None) -> list[int]:
            if most_new is not None:
                raise TooMuchNew
            assert free.wait(30)
            return super().encode(text, add_special_tokens=add_special_tokens)

    with ThreadPoolExecutor(1) as executor:
        try:
            bench = Bench(executor, Busy(), patience_s=0.05)
            huge = asyncio.create_task(bench.plan(prompt="a " * 5000))
            plan = await bench.plan(prompt="a " * 600)
            assert (plan.source, plan.why, plan.tokens) == ("none", "tokenizers_busy", None)
            assert plan.request.prompt_tokens >= 300
            assert (await huge).why == "tokenizers_busy"
        finally:
            free.set()


async def test_long_prompts_never_run_on_the_event_loop(bench: Bench) -> None:
    await bench.plan(prompt="a b")
    await bench.plan(prompt="a " * 600)
    short, long = bench.tokenizer.threads
    assert short == threading.current_thread().name
    assert long.startswith("tokenize")


async def test_of_a_long_prompt_that_is_known_no_thread_is_needed(bench: Bench) -> None:
    for _ in range(2):
        await bench.plan(prompt="a " * 600)
    first, again = bench.tokenizer.threads
    assert first.startswith("tokenize")
    assert again == threading.current_thread().name


async def test_keys_are_those_the_agents_report(bench: Bench) -> None:
    plan = await bench.plan(prompt="a bb ccc dddd eeeee", cache_salt="s")
    assert plan.tokens == 5
    assert list(plan.request.keys) == block_keys([1, 2, 3, 4], 4, root_key("tiny", cache_salt="s"))


async def test_without_tokens_bytes_give_keys_that_meet_no_other(bench: Bench) -> None:
    by_tokens = await bench.plan(prompt="abcd " * 20)
    bench.announce("unknown")
    first = await bench.plan(prompt="abcd " * 20 + "x")
    second = await bench.plan(prompt="abcd " * 20 + "y")
    assert (first.source, first.why, first.tokens) == ("bytes", "no_tokenizer", None)
    assert list(first.request.keys)[:6] == list(second.request.keys)[:6]
    assert not set(first.request.keys) & set(by_tokens.request.keys)


async def test_a_session_has_a_home_where_the_prompt_cannot_be_read(bench: Bench) -> None:
    readable = await bench.plan(prompt="abcd " * 20, prompt_cache_key="s-1")
    assert readable.request.keys, "what the digests show is better known"
    bench.announce("unknown")
    first = await bench.plan(prompt="abcd " * 20, prompt_cache_key="s-1")
    second = await bench.plan(prompt="other " * 30, prompt_cache_key="s-1")
    another = await bench.plan(prompt="other " * 30, prompt_cache_key="s-2")
    assert (first.request.keys, first.source) == ((), "bytes")
    assert first.request.session == second.request.session != another.request.session


async def test_a_deployment_bounds_the_output_of_each_request(bench: Bench) -> None:
    spec = common_pb2.DeploymentSpec(name="tiny", max_output_tokens=100)
    bench.view.records(registry_pb2.Records(deployments=[records_pb2.Deployment(spec=spec)]), now=0.0)
    assert (await bench.plan(prompt="a b", max_tokens=100)).request.output_tokens == 100
    with pytest.raises(InvalidRequest, match="at most 100") as refused:
        await bench.plan(prompt="a b", max_tokens=101)
    assert refused.value.fields[0].field == "max_tokens"
    spec.max_output_tokens = 0
    bench.view.records(registry_pb2.Records(deployments=[records_pb2.Deployment(spec=spec)]), now=0.0)
    await bench.plan(prompt="a b", max_tokens=101)


async def test_an_absurd_text_is_refused_without_being_tokenized(bench: Bench) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await bench.plan(prompt="x" * (16384 * 8 + 1))
    assert refused.value.fields[0].field == "input_text"
    assert not bench.tokenizer.threads


async def test_tokenizing_computes_nothing_that_could_be_found_again(bench: Bench) -> None:
    body = {"model": "tiny", "prompt": "a bb ccc dddd eeeee " * 50}
    pool, adapter = bench.view.resolve("tiny")
    plan = await bench.planner.plan(read(TOKENIZE, body, str(body).encode()), pool, adapter, "stoker")
    assert (list(plan.request.keys), plan.source) == ([], "none")
    assert (plan.request.prompt_tokens, plan.request.output_tokens) == (1, 0)
    assert not bench.tokenizer.threads


async def test_the_baseline_looks_at_nothing(bench: Bench) -> None:
    plan = await bench.plan("round_robin", prompt="a b c d e")
    assert (list(plan.request.keys), plan.source) == ([], "none")
    assert not bench.tokenizer.threads


async def test_the_alarm_rises_when_digests_do_not_show_what_was_served_and_falls_when_they_do(bench: Bench) -> None:
    plan = await bench.plan(prompt="a bb ccc dddd")
    target = bench.view.targets["a"]
    confirmations = Confirmations()
    now = 0.0
    for _ in range(20):
        confirmations.served(plan, target, now)
        confirmations.check(now + 5.1)
        now += 6.0
    assert confirmations.alarmed("tiny")
    bench.view.pools["tiny"].fleet.snapshot("a", core.Snapshot(1, 1, {core.Tier.GPU: list(plan.request.keys)}), now)
    for _ in range(32):
        confirmations.served(plan, target, now)
        confirmations.check(now + 0.5)
        now += 1.0
    assert not confirmations.alarmed("tiny")
