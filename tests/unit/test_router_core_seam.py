"""Where an answer that broke off may go on, and where not."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.router.core import Said, Seam, Stops, obstacle, seam
from stoker.router.core.seam import LONGEST

GREEDY: dict[str, Any] = {"model": "m", "prompt": "x", "temperature": 0, "stream": True}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"stop": ["."], "max_tokens": 9, "stop_token_ids": [2], "logit_bias": {"1": 2}, "top_k": 4, "user": "u"},
        {"n": 1, "best_of": 1, "presence_penalty": 0.0, "echo": False, "logprobs": None, "seed": 3},
        {"messages": [], "tools": [{"type": "function"}], "tool_choice": "none", "response_format": {"type": "text"}},
        {"stop": 5},
        {"stop": ["a", 5, None]},
        {"stream_options": {"include_usage": True}, "chat_template_kwargs": {"a": 1}, "logprobs": False},
    ],
)
def test_what_may_be_continued(more: dict[str, Any]) -> None:
    assert obstacle({**GREEDY, **more}, "sampled") == ""


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"n": 2}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": -1}, "frequency_penalty"),
        ({"echo": True}, "echo"),
        ({"logprobs": 0}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 0}, "logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function"}], "tool_choice": "auto"}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"structured_output": object()}, "structured_output"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"stop": ["a"], "min_tokens": 3}, "min_tokens"),
        ({"stop": "x" * 5000}, "stop"),
        ({"stop": ["x"] * 5000}, "stop"),
        ({"stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        ({"a_field_of_tomorrow": 1}, "a_field_of_tomorrow"),
        ({"temperature": 1.0, "seed": 7}, "seed"),
    ],
)
def test_what_may_not(more: dict[str, Any], named: str) -> None:
    assert obstacle({**GREEDY, **more}, "sampled") == named


def test_the_policy_allows_nothing_greedy_answers_or_sampled_ones_too() -> None:
    sampled = {"model": "m", "prompt": "x"}
    assert obstacle(GREEDY, "never") == "policy"
    assert obstacle(GREEDY, "greedy") == ""
    assert obstacle(sampled, "greedy") == "policy"
    assert obstacle({**sampled, "temperature": 0.7}, "greedy") == "policy"
    assert obstacle(sampled, "sampled") == ""


def test_tokens_whose_text_was_not_sent_are_kept_and_their_text_follows() -> None:
    assert seam(["Hel", "lo", " wor", "ld"], "Hello w") == Seam(4, "Hello world", 7)


def test_a_character_that_only_began_is_said_anew() -> None:
    assert seam(["a", "", ""], "a") == Seam(1, "a", 1)
    assert seam(["a", "", "火", ""], "a") == Seam(3, "a火", 1)
    assert seam([], "") == Seam(0, "", 0)


def test_text_that_its_tokens_do_not_say_has_no_seam() -> None:
    assert seam(["a", "b"], "ax") is None
    assert seam(["a"], "ab") is None


def heard(before: str, sent: int, pieces: list[str], stops: list[str], *, include: bool = False) -> tuple[str, str]:
    watch = Stops(Seam(1, before, sent), stops, include=include)
    said = ""
    for piece in pieces:
        said += watch.feed(piece)
        if watch.met:
            return said, watch.met
    return said + watch.rest(), ""


@pytest.mark.parametrize(
    ("before", "sent", "pieces", "stops", "expected"),
    [
        ("abc", 3, ["def"], [], ("def", "")),
        ("abc", 1, ["def"], [], ("bcdef", "")),
        ("abST", 4, ["O", "P", "x"], ["STOP"], ("", "STOP")),
        ("abST", 2, ["OPx"], ["STOP"], ("", "STOP")),
        ("abST", 2, ["O", "Qx"], ["STOP"], ("STOQx", "")),
        ("abST", 2, [], ["STOP"], ("ST", "")),
        ("ab", 2, ["STOP"], ["STOP"], ("STOP", "")),  # the engine's own to find
        ("a.", 2, ["\n", "\nb"], ["\n\n", ".\n\nb"], ("", ".\n\nb")),
        ("xaab", 4, ["c"], ["aabc", "bc"], ("", "aabc")),
    ],
)
def test_stop_texts_across_the_seam(
    before: str, sent: int, pieces: list[str], stops: list[str], expected: tuple[str, str]
) -> None:
    assert heard(before, sent, pieces, stops) == expected


def test_a_stop_text_that_shall_be_shown_is() -> None:
    assert heard("abST", 2, ["OPx"], ["STOP"], include=True) == ("STOP", "STOP")


def test_what_is_kept_of_an_answer_is_bounded() -> None:
    said = Said()
    said.add("x" * LONGEST, range(LONGEST))
    assert said.text
    said.add("x", [1])
    assert said.broken == "too_long"
    assert not said.tokens
    assert not said.texts
    said.add("x", [1])
    assert not said.tokens


def test_an_engine_that_tells_no_tokens_is_found_out() -> None:
    said = Said()
    said.add("", [])
    said.add("", [1])
    said = Said()
    said.add("text", [])
    assert said.broken == "no_tokens"
