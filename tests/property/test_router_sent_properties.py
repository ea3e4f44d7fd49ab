"""Tokens take the place of a prompt's text, and nothing else of a body changes."""

from __future__ import annotations

import json
import re
from array import array
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from stoker.router import core
from stoker.router.fleet.pools import OK, Pool, Target
from stoker.router.prompts.plan import TOKENS, Plan
from stoker.router.prompts.prompt import CHAT, COMPLETIONS
from stoker.router.prompts.sent import Sent
from tests.support.router import replica

# Texts of what separates values are those that could be taken for something else.
texts = st.text(st.sampled_from('",:{}[] \\ap\n\té'), max_size=12) | st.text(max_size=90)
values = texts | st.integers() | st.none() | st.lists(texts, max_size=3) | st.dictionaries(texts, texts, max_size=3)
fields = st.dictionaries(st.sampled_from(["model", "user", "stop", "x", '"prompt"', "pr"]), values, max_size=5)
tokens = st.lists(st.integers(0, 2**31), min_size=1, max_size=50)
separators = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\t")])


def plan_of(ids: list[int], max_model_len: int = 1000) -> Plan:
    pool = Pool("tiny", core.Fleet(), max_model_len=max_model_len)
    request = core.Request((), max(1, len(ids)))
    return Plan(pool, request, "stoker", TOKENS, ids=array("I", ids).tobytes(), tokenizer="sha")


def proved(sha256: str = "sha", parity: str = OK, *, takes_chats: bool = True) -> Target:
    return Target(replica("a", "http://a", sha256=sha256), parity=parity, takes_chat_tokens=takes_chats)


async def sent(raw: bytes, api: str, plan: Plan, target: Target, send_tokens: Any = "always") -> bytes:
    return await Sent(raw, api, json.loads(raw), plan, send_tokens).to(target)


@given(
    before=fields, text=texts, after=fields, separators=separators, ids=st.lists(st.integers(0, 2**31), min_size=1)
)
@example(before={}, text=":", after={}, separators=(",", ":"), ids=[1])
@example(before={"user": "x"}, text=",", after={}, separators=(",", ":"), ids=[1])
@example(before={"user": "same"}, text="same", after={}, separators=(",", ":"), ids=[1])
async def test_nothing_of_a_completion_changes_but_its_prompt(
    before: dict[str, Any], text: str, after: dict[str, Any], separators: tuple[str, str], ids: list[int]
) -> None:
    body = before | {"prompt": text} | {f"{name}_": value for name, value in after.items()}
    raw = json.dumps(body, separators=separators).encode()
    got = json.loads(await sent(raw, COMPLETIONS, plan_of(ids), proved()))
    # Where what it begins with stands elsewhere in the body too, the text may go as it is.
    begins = re.escape(json.dumps(text).encode()[:64])
    assert got == body | {"prompt": ids} or (got == body and len(re.findall(b"(?=" + begins + b")", raw)) > 1)


@given(before=fields, ids=tokens)
async def test_a_chat_keeps_all_that_it_says(before: dict[str, Any], ids: list[int]) -> None:
    body = {**before, "messages": [{"role": "user", "content": "hi"}]}
    got = json.loads(await sent(json.dumps(body).encode(), CHAT, plan_of(ids), proved()))
    assert got == {"kv_transfer_params": {"prompt_token_ids": ids}, **body}


async def test_long_prompts_are_written_in_steps() -> None:
    ids = [number * 7 for number in range(20_000)]
    got = await sent(b'{"model":"tiny","prompt":"long"}', COMPLETIONS, plan_of(ids, 1_000_000), proved())
    assert json.loads(got) == {"model": "tiny", "prompt": ids}


async def test_text_goes_where_tokens_might_change_the_answer() -> None:
    raw = b'{"prompt":"p","model":"tiny"}'
    plan = plan_of([1, 2])
    for target in (proved("other"), proved(parity="pending"), proved(parity="token 3 differs")):
        assert await sent(raw, COMPLETIONS, plan, target) == raw
    assert await sent(raw, COMPLETIONS, plan_of([]), proved()) == raw
    assert await sent(raw, COMPLETIONS, plan_of([1, 2], max_model_len=2), proved()) == raw
    assert await sent(raw, COMPLETIONS, plan_of([1, 2], max_model_len=0), proved()) == raw
    assert await sent(raw, COMPLETIONS, plan, proved(), "never") == raw
    assert await sent(raw, COMPLETIONS, plan, proved(), "completions") != raw
    assert await sent(b'{"messages":[]}', CHAT, plan, proved(), "completions") == b'{"messages":[]}'
    assert await sent(b'{"messages":[]}', CHAT, plan, proved(takes_chats=False)) == b'{"messages":[]}'
    assert await sent(raw, "embeddings", plan, proved()) == raw
    for name, value in {
        "echo": True,
        "suffix": "x",
        "truncate_prompt_tokens": 5,
        "return_token_offsets": True,
        "return_prompt_text": True,
        "kv_transfer_params": {},
    }.items():
        asking = json.dumps({"prompt": "p", name: value}).encode()
        assert await sent(asking, COMPLETIONS, plan, proved()) == asking, name
        chat = json.dumps({"messages": [], name: value}).encode()
        assert await sent(chat, CHAT, plan, proved()) == chat, name
    uncalled = b'{"messages":[],"tools":[{}],"tool_choice":"none"}'
    assert await sent(uncalled, CHAT, plan, proved()) == uncalled
    plain = json.dumps({"prompt": "p", "echo": False, "suffix": None}).encode()
    assert json.loads(await sent(plain, COMPLETIONS, plan, proved()))["prompt"] == [1, 2]
