"""Requests into the engine's words, and the engine's events into ours."""

from __future__ import annotations

import json
from typing import Any

import pytest
from google.protobuf import json_format, struct_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.api.inference.v1 import inference_pb2 as pb
from stoker.common.errors import Code, InvalidRequest, StokerError
from stoker.openai import body as openai_body
from stoker.openai.stream import EventStream, refusal
from stoker.router.grpc.prompt import of_generate


def request(**fields: Any) -> pb.GenerateRequest:
    if not {"text", "token_ids", "chat"} & fields.keys():
        fields["text"] = "hi"
    return pb.GenerateRequest(model="m", **fields)


def chat(*messages: pb.ChatMessage, **fields: Any) -> pb.Chat:
    return pb.Chat(messages=messages or (message("user", "hi"),), **fields)


def message(role: str, text: str = "", **fields: Any) -> pb.ChatMessage:
    return pb.ChatMessage(role=role, content=[pb.ContentPart(text=text)] if text else [], **fields)


def body(asked: pb.GenerateRequest, **limits: Any) -> dict[str, Any]:
    return openai_body.build(asked, "m", **limits)[1]


def test_an_unset_field_is_left_to_the_engine() -> None:
    path, sent = openai_body.build(request(), "m")
    assert path == "/v1/completions"
    assert sent == {"model": "m", "prompt": "hi", "stream": True, "stream_options": {"include_usage": True}}


def test_every_sampling_field_arrives_even_when_it_is_zero() -> None:
    zeros = pb.Sampling(temperature=0, top_k=0, min_p=0, min_tokens=0, seed=0, logprobs=0, ignore_eos=False)
    sent = body(request(sampling=zeros))
    for name in ("temperature", "top_k", "min_p", "min_tokens", "seed", "logprobs"):
        assert sent[name] == 0, name
    assert sent["ignore_eos"] is False
    given = {field.name for field in pb.Sampling.DESCRIPTOR.fields}
    handled = set(openai_body._SCALARS) | set(openai_body._LISTS) | {"logit_bias", "logprobs"}
    assert given == handled, "a sampling field is dropped"


def test_logprobs_of_a_chat_have_another_form() -> None:
    sent = body(request(chat=chat(), sampling=pb.Sampling(logprobs=3)))
    assert (sent["logprobs"], sent["top_logprobs"]) == (True, 3)


def test_a_conversation_keeps_all_its_parts() -> None:
    schema = struct_pb2.Struct()
    json_format.ParseDict({"type": "object", "properties": {"n": {"type": "integer", "minimum": 1}}}, schema)
    asked = chat(
        message("system", "be brief"),
        pb.ChatMessage(
            role="user",
            content=[pb.ContentPart(text="look"), pb.ContentPart(image_url="data:image/png;base64,AA")],
        ),
        message("assistant", tool_calls=[pb.ToolCall(id="c1", name="f", arguments='{"n":1}')]),
        message("tool", "42", tool_call_id="c1"),
        tools=[pb.Tool(name="f", description="d", parameters=schema, strict=True)],
        tool_choice="f",
        parallel_tool_calls=False,
        continue_final_message=True,
    )
    sent = body(request(chat=asked))
    assert sent["messages"] == [
        {"role": "system", "content": "be brief"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "look"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
            ],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"n":1}'}}],
        },
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]
    assert sent["tools"][0]["function"]["parameters"]["properties"]["n"]["minimum"] == 1
    assert sent["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert (sent["add_generation_prompt"], sent["continue_final_message"]) == (False, True)
    assert sent["parallel_tool_calls"] is False


def test_extra_fields_go_as_they_are() -> None:
    extra = struct_pb2.Struct()
    extra.update({"guess": 5, "deep": {"list": [1, 2.5, None]}})
    sent = body(request(extra=extra))
    assert sent["guess"] == 5
    assert isinstance(sent["guess"], int)
    assert sent["deep"] == {"list": [1, 2.5, None]}


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 1_000_000},
        {"max_completion_tokens": 1_000_000},
        {"n": 1000},
        {"best_of": 1000},
        {"cache_salt": "another tenant's"},
        {"priority": -1000},
        {"truncate_prompt_tokens": 5},
        {"tools": []},
        {"chat_template": "{{ 1 }}"},
        {"add_generation_prompt": False},
        {"structured_outputs": {}},
        {"logit_bias": {}},
    ],
)
def test_what_has_a_field_or_a_bound_is_not_to_be_set_by_the_back_door(fields: dict[str, Any]) -> None:
    extra = json_format.ParseDict(fields, struct_pb2.Struct())
    for asked in (request(extra=extra), request(chat=chat(), extra=extra)):
        with pytest.raises(InvalidRequest) as caught:
            body(asked, max_output=50, max_n=4)
        assert caught.value.fields[0].field == f"extra.{next(iter(fields))}"


@pytest.mark.parametrize(
    ("form", "sent"),
    [
        (pb.StructuredOutput(json_schema='{"type":"object"}'), {"json": '{"type":"object"}'}),
        (pb.StructuredOutput(json_object=True), {"json_object": True}),
        (pb.StructuredOutput(regex="a+"), {"regex": "a+"}),
        (pb.StructuredOutput(choices=pb.Choices(texts=["a", "b"])), {"choice": ["a", "b"]}),
    ],
)
def test_forms_of_output(form: pb.StructuredOutput, sent: dict[str, Any]) -> None:
    assert body(request(structured_output=form))["structured_outputs"] == sent


def test_the_deployments_bound_holds_whether_asked_or_not() -> None:
    assert body(request(), max_output=50)["max_tokens"] == 50
    assert body(request(sampling=pb.Sampling(max_tokens=7)), max_output=50)["max_tokens"] == 7
    with pytest.raises(InvalidRequest) as caught:
        body(request(sampling=pb.Sampling(max_tokens=51)), max_output=50)
    assert caught.value.fields[0].field == "sampling.max_tokens"


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (request(text=""), "text"),
        (request(token_ids=pb.TokenIds()), "token_ids.ids"),
        (request(token_ids=pb.TokenIds(ids=range(10))), "token_ids.ids"),
        (
            request(token_ids=pb.TokenIds(ids=[1] * 1_000_001), sampling=pb.Sampling(truncate_prompt_tokens=1)),
            "token_ids.ids",
        ),
        (request(chat=pb.Chat()), "chat.messages"),
        (request(chat=chat(message("", "x"))), "chat.messages[0].role"),
        (request(chat=chat(tools=[pb.Tool()])), "chat.tools[0].name"),
        (request(sampling=pb.Sampling(max_tokens=0)), "sampling.max_tokens"),
        (request(sampling=pb.Sampling(temperature=-0.1)), "sampling.temperature"),
        (request(sampling=pb.Sampling(temperature=float("nan"))), "sampling.temperature"),
        (request(sampling=pb.Sampling(top_p=0)), "sampling.top_p"),
        (request(sampling=pb.Sampling(n=0)), "sampling.n"),
        (request(sampling=pb.Sampling(n=129)), "sampling.n"),
        (request(sampling=pb.Sampling(max_tokens=1, min_tokens=2)), "sampling.min_tokens"),
        (request(sampling=pb.Sampling(stop=[""])), "sampling.stop"),
        (request(sampling=pb.Sampling(logit_bias={1: 101})), "sampling.logit_bias"),
        (request(structured_output=pb.StructuredOutput()), "structured_output"),
        (request(extra=json_format.ParseDict({"stream": False}, struct_pb2.Struct())), "extra.stream"),
        (
            request(
                extra=json_format.ParseDict({"vllm_xargs": {"kv_cache_report_mode": "full"}}, struct_pb2.Struct())
            ),
            "extra.vllm_xargs.kv_cache_report_mode",
        ),
    ],
)
def test_nonsense_names_its_field(asked: pb.GenerateRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        body(asked, max_model_len=10)
    assert caught.value.fields[0].field == field


def masses() -> list[tuple[pb.GenerateRequest, str]]:
    """Requests of well below 16 MiB that would take seconds to turn into JSON."""
    much = json_format.ParseDict({"x": [None] * 200_000}, struct_pb2.Struct())
    many = pb.ChatMessage(role="user", content=[pb.ContentPart()] * 30_000)
    return [
        (request(chat=pb.Chat(messages=[pb.ChatMessage(role="user")] * 30_000)), "chat.messages"),
        (request(chat=chat(many)), "chat.messages"),
        (request(chat=chat(message("assistant", tool_calls=[pb.ToolCall()] * 30_000))), "chat.messages"),
        (request(chat=chat(tools=[pb.Tool(name="f")] * 30_000)), "chat.messages"),
        (request(chat=chat(tools=[pb.Tool(name="f", parameters=much)])), "chat.tools"),
        (request(chat=chat(template_kwargs=much)), "chat.tools"),
        (request(extra=much), "extra"),
        (request(sampling=pb.Sampling(logit_bias=dict.fromkeys(range(150_000), 1.0))), "sampling.logit_bias"),
        (request(sampling=pb.Sampling(allowed_token_ids=range(1_000_001))), "sampling.allowed_token_ids"),
    ]


@pytest.mark.parametrize(("asked", "field"), masses())
def test_what_takes_long_to_read_is_refused_before(asked: pb.GenerateRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        body(asked)
    assert caught.value.fields[0].field == field
    if field.startswith("chat"):
        with pytest.raises(InvalidRequest) as caught:
            of_generate(asked, b"")
        assert caught.value.fields[0].field == field


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_json_cannot_say_is_refused(value: float) -> None:
    asked = request()
    asked.extra.update({"x": value})
    with pytest.raises(InvalidRequest) as refused:
        body(asked)
    assert refused.value.fields[0].field == "extra"


def test_no_prompt_at_all() -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        openai_body.build(pb.GenerateRequest(model="m"), "m")


# --- events ----------------------------------------------------------------------------------------------------


def events(*chunks: object) -> bytes:
    lines = [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks]
    return b"".join(lines) + b"data: [DONE]\n\n"


def said(text: str, index: int = 0, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": index, "text": text, **more}]}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}},
}


def test_what_arrives_together_leaves_together() -> None:
    stream = EventStream()
    data = events(said("a"), said("x", 1), said("b"), said("c", finish_reason="length"), USAGE)
    deltas = stream.feed(data)
    assert [(d.index, d.text, d.finish_reason) for d in deltas] == [(0, "abc", "length"), (1, "x", "")]
    assert stream.done
    assert stream.usage is not None
    assert (stream.usage.prompt_tokens, stream.usage.cached_prompt_tokens) == (9, 8)


@pytest.mark.parametrize("details", [None, {}, {"cached_tokens": None}, {"cached_tokens": 0}])
def test_what_the_engine_does_not_say_of_its_cache_stays_unknown(details: dict[str, Any] | None) -> None:
    stream = EventStream()
    stream.feed(events({"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": details}}))
    assert stream.usage is not None
    assert stream.usage.HasField("cached_prompt_tokens") is (details == {"cached_tokens": 0})


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(1, 40)))
def test_any_split_of_the_bytes_says_the_same(cuts: list[int]) -> None:
    data = events(
        said("Ω one"), said(" two", token_ids=[1, 2]), said("é", finish_reason="stop", stop_reason=7), USAGE
    )
    stream, text, at = EventStream(), "", 0
    ids: list[int] = []
    for cut in [*cuts, len(data)]:
        for delta in stream.feed(data[at : at + cut]):
            text += delta.text
            ids += delta.token_ids
        at += cut
    assert text == "Ω one twoé"
    assert ids == [1, 2]
    assert stream.done
    assert stream.usage is not None


def test_chat_deltas() -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "f", "arguments": '{"a"'}}
    more = {"index": 0, "function": {"arguments": ":1}"}}
    (delta,) = EventStream().feed(
        events(
            {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
            {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]},
            {"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]},
            {"choices": [{"index": 0, "delta": {"tool_calls": [more]}, "finish_reason": "tool_calls"}]},
        )
    )
    assert delta.reasoning == "hm"
    (made,) = delta.tool_calls
    assert (made.id, made.name, made.arguments) == ("c1", "f", '{"a":1}')
    assert delta.finish_reason == "tool_calls"


def test_logprobs_of_both_apis() -> None:
    top = {"token": "b", "logprob": -2.0, "bytes": [98]}
    item = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [top]}
    (chatted,) = EventStream().feed(
        events({"choices": [{"delta": {"content": "a"}, "logprobs": {"content": [item]}}]})
    )
    plain = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"b": -2.0}], "text_offset": [0]}
    (completed,) = EventStream().feed(events(said("a", logprobs=plain)))
    assert chatted.logprobs == completed.logprobs
    assert completed.logprobs[0].top[0].token_bytes == b"b"


@pytest.mark.parametrize("rubbish", [b"data: {\n\n", b"data: 5\n\n", b'data: {"choices": 3}\n\n'])
def test_rubbish_costs_the_call_only(rubbish: bytes) -> None:
    with pytest.raises(StokerError) as caught:
        EventStream().feed(rubbish)
    assert caught.value.reason == "ENGINE_ERROR"


def test_an_error_in_the_stream() -> None:
    with pytest.raises(StokerError, match="went wrong"):
        EventStream().feed(b'data: {"error": {"message": "it went wrong", "code": 500}}\n\n')


def test_refusals() -> None:
    refused = refusal(400, b'{"error": {"message": "too big", "param": "max_tokens", "code": 400}}')
    assert (refused.code, refused.fields[0].field) == (Code.INVALID_ARGUMENT, "sampling.max_tokens")
    assert refusal(400, b'{"error": {"message": "too long", "param": "input_tokens"}}').fields[0].field == "prompt"
    assert refusal(404, b'{"detail": "Not Found"}').code is Code.UNIMPLEMENTED
    assert refusal(503, b"").code is Code.UNAVAILABLE
    assert refusal(429, b"{}").code is Code.RESOURCE_EXHAUSTED
    assert refusal(500, b"<html>").code is Code.INTERNAL
    assert EventStream().feed(b'data: {"choices": [], "error": null}\n\n') == []
    assert "plain words" in refusal(404, b"plain words").message
