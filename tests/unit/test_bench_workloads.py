"""The seeded workloads: repeatable, sized as asked, and shared as they claim."""

from __future__ import annotations

from collections import Counter

import pytest

from stoker.bench import workloads


@pytest.mark.parametrize("name", sorted(workloads.WORKLOADS))
def test_a_seed_gives_the_same_prompts(name: str) -> None:
    make = workloads.WORKLOADS[name]
    assert make(3) == make(3)
    assert make(3) != make(4)


def test_shared_prompts_share_their_prefix_and_nothing_after_it() -> None:
    prompts = workloads.shared(1)
    assert len(prompts) == 150
    groups: dict[str, list[list[str]]] = {}
    for prompt in prompts:
        words = prompt.text.split()
        assert len(words) == 2_880
        groups.setdefault(prompt.group, []).append(words)
    for group in groups.values():
        assert len({tuple(words[:2_700]) for words in group}) == 1
        assert len({tuple(words[2_700:]) for words in group}) == len(group)
    assert len({tuple(group[0][:50]) for group in groups.values()}) == len(groups)


def test_popularity_falls_with_rank() -> None:
    counts = Counter(prompt.group for prompt in workloads.shared(1, requests=5_000, prefix_tokens=1, tail_tokens=1))
    assert counts["prefix-0"] > counts["prefix-3"] > counts["prefix-20"] > 0
    assert 0.15 < counts["prefix-0"] / 5_000 < 0.25


def test_common_tokens_come_before_everything() -> None:
    prompts = workloads.shared(1, common_tokens=1_000)
    assert len({tuple(prompt.text.split()[:1_000]) for prompt in prompts}) == 1
    assert {len(prompt.text.split()) for prompt in prompts} == {2_880}


def test_a_turn_repeats_all_before_it_and_waits_for_it() -> None:
    prompts = workloads.chat(1)
    assert len(prompts) == 150
    assert len({prompt.messages[0] for prompt in prompts}) == 4
    last: dict[str, int] = {}
    for number, prompt in enumerate(prompts):
        assert prompt.after == last.get(prompt.group, -1)
        if prompt.after >= 0:
            before = prompts[prompt.after].messages
            assert prompt.messages[: len(before)] == before
            assert [role for role, _ in prompt.messages[len(before) :]] == ["assistant", "user"]
        last[prompt.group] = number


def test_agents_send_short_turns_after_long_tool_prompts() -> None:
    prompts = workloads.agentic(1)
    assert len(prompts) == 240
    tools = {prompt.messages[0] for prompt in prompts}
    assert len(tools) == 4
    assert {len(content.split()) for _, content in tools} == {2_400}
    assert {len(prompt.messages[-1][1].split()) for prompt in prompts} == {60}
    longest = max(sum(len(content.split()) for _, content in prompt.messages) for prompt in prompts)
    assert longest < 3_200


def test_unique_prompts_differ_from_the_first_words() -> None:
    assert len({tuple(prompt.text.split()[:16]) for prompt in workloads.unique(1)}) == 100


def test_words_follow_the_tokenizer() -> None:
    prompt = workloads.unique(1, prompt_tokens=1_500, tokens_per_word=1.5)[0]
    assert len(prompt.text.split()) == 1_000


def test_one_tenant_has_half_of_the_groups_and_two_a_quarter_each() -> None:
    prompts = workloads.by_tenants(workloads.chat(2, conversations=8, turns=2))
    of = {prompt.group: prompt.tenant for prompt in prompts}
    assert Counter(of.values()) == {"half": 4, "third-quarter": 2, "last-quarter": 2}
    assert all(of[prompt.group] == prompt.tenant for prompt in prompts)
    assert workloads.by_tenants([]) == []
