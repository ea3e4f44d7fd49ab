"""The router turns prompts into the tokens of a real vLLM, whatever chat template the model has."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from stoker.local.model import cached
from stoker.node_agent import tokenizer_files
from stoker.router.prompts.plan import tokens_of
from stoker.router.prompts.prompt import CHAT, COMPLETIONS, read
from stoker.router.prompts.tokenizer import ModelTokenizer
from tests.support.engines import TINY, RunningEngine

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

SYSTEM = {"role": "system", "content": "You are a stoker. <b>Be brief & kind.</b>\n"}
ASKED = {"role": "user", "content": "How hot is it? 火 🔥 {{ 7 * 7 }} <|turn|>"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "How hot?"}, {"type": "text", "text": "In °C."}]}
ANSWERED = {"role": "assistant", "content": "  About 451. "}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "read_gauge", "arguments": '{"id": 7, "a": "é"}'}},
        {"id": "call_2", "type": "function", "function": {"name": "read_gauge", "arguments": "{}"}},
    ],
}
TOLD = {"role": "tool", "tool_call_id": "call_1", "content": "451"}
TOLD_IN_PARTS = {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "cold"}]}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_gauge",
            "description": "Reads a gauge — “now”",
            "strict": True,
            "parameters": {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]},
        },
    },
    {"type": "function", "function": {"name": "wait"}},
]
LONG = [message for turn in range(12) for message in ({"role": "user", "content": f"{turn} coal " * 40}, ANSWERED)]

CHATS: dict[str, dict[str, Any]] = {
    "one message": {"messages": [ASKED]},
    "system": {"messages": [SYSTEM, ASKED]},
    "parts": {"messages": [SYSTEM, PARTS]},
    "several turns": {"messages": [SYSTEM, ASKED, ANSWERED, PARTS]},
    "a long chat": {"messages": [SYSTEM, *LONG, ASKED]},
    "tools": {"messages": [ASKED], "tools": TOOLS},
    "tools called": {"messages": [SYSTEM, ASKED, CALLED, TOLD, TOLD_IN_PARTS], "tools": TOOLS},
    "no tools": {"messages": [ASKED], "tools": []},
    "no opening": {"messages": [SYSTEM, ASKED, ANSWERED], "add_generation_prompt": False},
    "continued": {
        "messages": [ASKED, ANSWERED], "add_generation_prompt": False, "continue_final_message": True,
    },
    "continued parts": {
        "messages": [ASKED, {"role": "assistant", "content": [{"type": "text", "text": "About"}]}],
        "add_generation_prompt": False, "continue_final_message": True,
    },
    "variables": {"messages": [ASKED], "chat_template_kwargs": {"shout": True, "unheard_of": [1]}},
    "framed": {"messages": [ASKED], "add_special_tokens": True},
    "a name": {"messages": [{**ASKED, "name": "Ada"}]},
    "developer": {"messages": [{"role": "developer", "content": "Be brief."}, ASKED]},
    "two systems": {"messages": [SYSTEM, ASKED, ANSWERED, {"role": "system", "content": "Now be long."}, ASKED]},
    "nothing said": {"messages": [{"role": "user", "content": ""}]},
}  # fmt: skip
TEMPLATES = {
    "the model's own": None,
    "printing": "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|turn_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}",
    "stripping": "{{ bos_token }}{%- for m in messages %}\n  {%- if loop.first and m['role'] == 'system' %}\n"
    "{{ m['content'] | trim }}\n  {%- else %}\n<|turn|>{{ m['role'] }}: {{ m['content'] | trim }}\n  {%- endif %}\n"
    "{%- endfor %}\n{%- if add_generation_prompt %}\n<|turn|>assistant:{%- endif %}",
    "walking through parts": "{% for message in messages %}<|turn|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}[{{ part['text'] }}]{% endif %}{% endfor %}"
    "{% endif %}<|turn_end|>{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}",
    "with tools": "{% if tools %}{{ tools | tojson }}\n{% for t in tools %}{{ t.function.name }}:"
    "{{ t.function.parameters | tojson(indent=2) }}{% endfor %}{% endif %}"
    "{% for m in messages %}<|turn|>{{ m.role }}{% if m.name is defined %}({{ m.name }}){% endif %}\n"
    "{{ m.content if m.content is not none else '' }}{% if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>"
    "{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v }},{% endfor %})"
    "{% endfor %}{% endif %}{% if m.tool_call_id is defined %}#{{ m.tool_call_id }}{% endif %}<|turn_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}",
    "with state": "{% set ns = namespace(system='', seen=0) %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = ns.system ~ m.content %}{% else %}{% set ns.seen = ns.seen + 1 %}"
    "{% endif %}{% endfor %}{{ ns.system }}|{{ ns.seen }}|{% for m in messages if m.role != 'system' %}<|turn|>"
    "{% generation %}{{ m.content }}{% endgeneration %}{% if loop.index == 20 %}{% break %}{% endif %}{% endfor %}"
    "{% if shout is defined and shout %}LOUD{% endif %}{% if add_generation_prompt %}<|turn|>{% endif %}",
}


def tokenizer(template: str | None) -> ModelTokenizer:
    """The model's tokenizer, with another template."""
    model = cached(TINY)
    files = {name: (model / name).read_bytes() for name in tokenizer_files.NAMES if (model / name).is_file()}
    if template is not None:
        files["chat_template.jinja"] = template.encode()
    return ModelTokenizer(files)


async def theirs(engine: RunningEngine, body: dict[str, Any]) -> list[int] | None:
    """The engine's tokens; None where it refuses."""
    async with engine.session.post(f"{engine.url}/tokenize", json={"model": engine.model, **body}) as answer:
        if answer.status != 200:
            assert answer.status == 400, await answer.text()
            return None
        tokens: list[int] = (await answer.json())["tokens"]
        return tokens


def ours(api: str, body: dict[str, Any], made: ModelTokenizer) -> list[int]:
    asked = read(api, {"model": "tiny", **body}, msgspec.json.encode(body))
    assert not asked.prompt.unreadable
    lists = tokens_of(asked.prompt, made, 8192)
    assert lists is not None
    return list(lists[0])


@pytest.mark.parametrize("name", TEMPLATES)
async def test_chats_have_the_engines_tokens(vllm: RunningEngine, name: str) -> None:
    template = TEMPLATES[name]
    made = tokenizer(template)
    own = {} if template is None else {"chat_template": template}
    differ, compared = [], 0
    for case, body in CHATS.items():
        expected = await theirs(vllm, {**body, **own})
        if expected is None:
            continue  # what the engine refuses needs no keys
        compared += 1
        if ours(CHAT, body, made) != expected:
            differ.append(case)
    assert not differ
    assert compared > len(CHATS) - 4


@pytest.mark.parametrize("special", [None, True, False])
async def test_texts_have_the_engines_tokens(vllm: RunningEngine, special: bool | None) -> None:
    made = tokenizer(None)
    more = {} if special is None else {"add_special_tokens": special}
    texts = [
        "a",
        " a  b\n\n\tc\r\n",
        "火🔥é½ № ﬀ",
        "<|begin|>x<|turn|><|end|> y",
        "don't 1234567 </s>",
        "word " * 3_000,
    ]
    texts.append("<|turn|>user\n" + "coal and water, " * 200 + "<|turn_end|>" + "and fire " * 100)
    for text in texts:
        assert ours(COMPLETIONS, {"prompt": text, **more}, made) == await theirs(vllm, {"prompt": text, **more}), (
            text[:40]
        )
