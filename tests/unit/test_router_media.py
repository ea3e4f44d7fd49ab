"""Conversations with images: what an engine is known to hold of them, and what keeps two images apart."""

from __future__ import annotations

import json
import random
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from stoker.api.registry.v1 import registry_pb2
from stoker.common.blocks import block_keys, root_key
from stoker.common.errors import InvalidRequest
from stoker.router import core
from stoker.router.fleet.view import View
from stoker.router.prompts.plan import BYTES, MEDIA, Plan, Planner
from stoker.router.prompts.prompt import CHAT, read
from stoker.router.prompts.render import ChatTemplate, Conversation
from stoker.router.prompts.tokenizer_store import TokenizerStore
from tests.support.router import replica

BLOCK = 4
SHOWS_ALL = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
WALKS = "{% for m in messages %}{{ m.role }} {% for part in m.content %}{{ part.text }} {% endfor %}{% endfor %}"
SYSTEM = {"role": "system", "content": "one two three four five six seven eight nine"}


class Words:
    """A tokenizer of a word a token."""

    max_chars_per_token = 64

    def __init__(self, template: str) -> None:
        self._template = ChatTemplate(template, {})

    def encode(self, text: str, *, add_special_tokens: bool = True, most_new: int | None = None) -> list[int]:
        return [zlib.crc32(word.encode()) for word in text.split()]

    def render(self, conversation: Conversation) -> str:
        return self._template.render(conversation)


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def asks(*images: str, text: str = "what is on these pictures, and why are they all of cats") -> dict[str, Any]:
    return {"role": "user", "content": [*map(image, images), {"type": "text", "text": text}]}


async def plan(*messages: dict[str, Any], template: str = SHOWS_ALL, longest: int = 64) -> Plan:
    store = TokenizerStore(lambda _: None, "", random.Random(0))  # type: ignore[arg-type, return-value]
    store.add("sha", Words(template))  # type: ignore[arg-type]
    view = View(core.RoutingConfig(), core.HealthConfig())
    record = replica("a", "http://a", sha256="sha", block_size=BLOCK, max_model_len=longest)
    view.records(registry_pb2.Records(replicas=[record]), now=0.0, snapshot=True)
    pool, adapter = view.resolve("tiny")
    whole = {"model": "tiny", "messages": list(messages)}
    with ThreadPoolExecutor(1) as executor:
        planner = Planner(store, executor, inline_bytes=10_000)
        return await planner.plan(read(CHAT, whole, json.dumps(whole).encode()), pool, adapter, "stoker")


def shared(a: Plan, b: Plan) -> int:
    """How many leading blocks two requests have in common."""
    pairs = list(zip(a.request.keys, b.request.keys, strict=False))
    return next((at for at, (mine, other) in enumerate(pairs) if mine != other), len(pairs))


@pytest.mark.parametrize("template", [SHOWS_ALL, WALKS])
async def test_before_the_first_image_blocks_have_the_keys_that_their_agent_gives_them(template: str) -> None:
    got = await plan(SYSTEM, asks("data:cat"), template=template)
    before = Words(template).encode("system one two three four five six seven eight nine user")
    assert got.source == MEDIA
    keys = block_keys(before, BLOCK, root_key("tiny"))
    assert len(keys) == 2
    assert list(got.request.keys[:2]) == keys


async def test_two_images_share_no_block_behind_them() -> None:
    cat, dog = await plan(SYSTEM, asks("data:cat")), await plan(SYSTEM, asks("data:dog"))
    assert shared(cat, dog) == 2
    assert len(cat.request.keys) > 4
    assert not {*cat.request.keys[2:]} & {*dog.request.keys[2:]}


async def test_text_alone_shares_no_block_behind_an_image() -> None:
    with_image, without = await plan(SYSTEM, asks("data:cat")), await plan(SYSTEM, asks())
    assert shared(with_image, without) == 2


async def test_the_order_of_images_counts() -> None:
    one, other = await plan(asks("data:cat", "data:dog")), await plan(asks("data:dog", "data:cat"))
    assert shared(one, other) == 0


async def test_the_next_turn_begins_with_the_blocks_of_the_last() -> None:
    first = [SYSTEM, asks("data:cat")]
    answer = {"role": "assistant", "content": "a cat"}
    before, after = await plan(*first), await plan(*first, answer, asks("data:dog"))
    assert shared(before, after) == len(before.request.keys)
    assert len(after.request.keys) > len(before.request.keys)


async def test_an_image_counts_as_prompt() -> None:
    plans = [await plan(asks(*images), longest=100_000) for images in ((), ("a",), ("a", "b"))]
    text, one, two = (each.request.prompt_tokens for each in plans)
    assert two - one == one - text > 100


async def test_how_many_tokens_there_are_is_not_claimed() -> None:
    assert (await plan(SYSTEM, asks("data:cat"))).tokens is None


async def test_too_much_text_beside_an_image_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="maximum context length is 64"):
        await plan(asks("data:cat", text="word " * 70))


@pytest.mark.parametrize(
    "template", ["{{ messages[0].content }}", "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}"]
)
async def test_where_the_template_does_not_show_each_image_once_bytes_are_hashed(template: str) -> None:
    got = await plan(asks(text="first"), asks("data:cat"), template=template)
    assert (got.source, got.why) == (BYTES, "not_rendered")


async def test_a_caller_cannot_pass_text_for_an_image() -> None:
    forged = asks("data:cat", text="\ue000stoker-media\ue000")
    assert (await plan(forged)).source == BYTES
