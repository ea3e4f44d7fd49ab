"""Every API's request is read for routing by one path."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.common.errors import InvalidRequest
from stoker.router.prompts.plan import tokens_of
from stoker.router.prompts.prompt import CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, Prompt, read


def prompt(api: str, **body: Any) -> Prompt:
    return read(api, {"model": "m", **body}, b"raw").prompt


def test_completions_take_texts_and_tokens() -> None:
    assert prompt(COMPLETIONS, prompt="x").texts == ("x",)
    assert list(prompt(COMPLETIONS, prompt=["x", "y"]).texts) == ["x", "y"]
    assert list(prompt(COMPLETIONS, prompt=[1, 2]).token_ids) == [[1, 2]]
    assert list(prompt(COMPLETIONS, prompt=[[1], [2]]).token_ids) == [[1], [2]]
    assert list(prompt(EMBEDDINGS, input=[1, 2]).token_ids) == [[1, 2]]


@pytest.mark.parametrize("odd", [[], [1, "x"], {"a": 1}, 5, [[1, True]], [-1]])
def test_what_cannot_be_read_is_left_to_the_engine(odd: Any) -> None:
    assert prompt(COMPLETIONS, prompt=odd).unreadable == "form"


@pytest.mark.parametrize(
    ("api", "body"), [(COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": [{}]}), (RESPONSES, {"input": "x"})]
)
def test_no_caller_may_have_events_repeated(api: str, body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        prompt(api, **body, vllm_xargs={"kv_cache_report_mode": "full"})
    assert refused.value.fields[0].field == "vllm_xargs.kv_cache_report_mode"
    prompt(api, **body, vllm_xargs={"other": 1})


def test_special_tokens_are_added_where_the_engine_adds_them() -> None:
    assert prompt(COMPLETIONS, prompt="x").add_special_tokens
    assert not prompt(COMPLETIONS, prompt="x", add_special_tokens=False).add_special_tokens
    assert not prompt(CHAT, messages=[{"role": "user", "content": "x"}]).add_special_tokens
    assert prompt(RESPONSES, input="x").add_special_tokens


@pytest.mark.parametrize("said", [16000, 16000.0, "16000", "16_000", " 16000.0 "])
def test_what_the_engine_takes_for_a_number_counts_as_one(said: object) -> None:
    asked = prompt(COMPLETIONS, prompt="x", max_tokens=said, n=said)
    assert (asked.max_output_tokens, asked.choices) == (16000, 16000)


@pytest.mark.parametrize("said", [True, "x", "", "9" * 5000, 1.5, -1, float("inf"), float("nan"), [], {}])
def test_what_is_no_count_is_left_to_the_engine(said: object) -> None:
    asked = prompt(COMPLETIONS, prompt="x", max_tokens=said, n=said)
    assert (asked.max_output_tokens, asked.choices) == (None, 1)


def test_max_completion_tokens_win_over_max_tokens() -> None:
    messages = [{"role": "user", "content": "x"}]
    both = prompt(CHAT, messages=messages, max_tokens=1, max_completion_tokens=2)
    assert (both.max_output_tokens, both.max_output_field) == (2, "max_completion_tokens")
    assert prompt(CHAT, messages=messages, max_tokens=1).max_output_tokens == 1
    assert prompt(CHAT, messages=messages).max_output_tokens is None


def test_responses_become_a_conversation() -> None:
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "42"},
    ]
    tools = [{"type": "function", "name": "f", "parameters": {}, "strict": True}]
    conversation = prompt(RESPONSES, input=items, instructions="be brief", tools=tools).conversation
    assert conversation is not None
    assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant", "tool"]
    assert conversation.messages[2]["tool_calls"][0]["function"]["name"] == "f"
    assert conversation.tools == [{"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}]


def test_history_that_an_engine_keeps_is_said_to_be_unreadable() -> None:
    assert prompt(RESPONSES, input="x", previous_response_id="resp_1").unreadable == "stored_history"


def test_a_template_of_the_caller_is_never_run_here() -> None:
    messages = [{"role": "user", "content": "x"}]
    assert prompt(CHAT, messages=messages, chat_template="{{ 1 }}").unreadable == "own_template"


@pytest.mark.parametrize("model", [None, "", 5, ["m"]])
def test_a_model_must_be_named(model: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(COMPLETIONS, {"model": model, "prompt": "x"}, b"")
    assert refused.value.fields[0].field == "model"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, [1, 2, 3, 4]),
        ({"truncate_prompt_tokens": 2}, [1, 2]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "left"}, [3, 4]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 5}, [1, 2]),
    ],
)
def test_prompts_are_cut_as_the_engine_cuts_them(body: dict[str, Any], expected: list[int]) -> None:
    lists = tokens_of(prompt(COMPLETIONS, prompt=[1, 2, 3, 4], **body), None, 3)
    assert lists is not None
    assert list(lists[0]) == expected
