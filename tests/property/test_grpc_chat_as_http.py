"""A chat over gRPC is routed by what its engine will read: the body that is made of it for the engine's HTTP API."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from stoker.api.inference.v1 import inference_pb2
from stoker.common.errors import InvalidRequest
from stoker.openai import body as openai_body
from stoker.router.grpc.prompt import of_generate, of_tokenize
from stoker.router.prompts.prompt import CHAT, read

_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(-1e9, 1e9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_part = st.builds(inference_pb2.ContentPart, text=st.text(max_size=8)) | st.builds(
    inference_pb2.ContentPart, image_url=st.text(max_size=8)
)
_call = st.builds(
    inference_pb2.ToolCall, id=st.text(max_size=4), name=st.text(max_size=4), arguments=st.text(max_size=4)
)
_message = st.builds(
    inference_pb2.ChatMessage,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=st.lists(_part, max_size=3),
    name=st.text(max_size=4),
    tool_call_id=st.text(max_size=4),
    reasoning=st.text(max_size=4),
    tool_calls=st.lists(_call, max_size=2),
)


@st.composite
def chats(draw: st.DrawFn) -> inference_pb2.Chat:
    chat = inference_pb2.Chat(messages=draw(st.lists(_message, min_size=1, max_size=4)))
    for name in draw(st.lists(st.text(min_size=1, max_size=4), max_size=2)):
        tool = chat.tools.add(name=name, description=draw(st.text(max_size=4)))
        if draw(st.booleans()):
            tool.parameters.update(draw(st.dictionaries(st.text(max_size=4), _json, max_size=3)))
    if draw(st.booleans()):
        chat.template_kwargs.update(draw(st.dictionaries(st.text(max_size=4), _json, max_size=3)))
    chat.omit_generation_prompt = draw(st.booleans())
    chat.continue_final_message = draw(st.booleans())
    return chat


@given(chats())
def test_the_same_conversation_is_read(chat: inference_pb2.Chat) -> None:
    request = inference_pb2.GenerateRequest(model="m", chat=chat)
    _, body = openai_body.build(request, "m")
    over_http = read(CHAT, body, b"").prompt
    asked = of_generate(request, b"")
    over_grpc = asked.prompt
    # Only what the limit is called differs.
    assert replace(over_grpc, max_output_field="") == replace(over_http, max_output_field="")
    assert openai_body.build(request, "m", read=asked.fields) == openai_body.build(request, "m")
    tokenize = inference_pb2.TokenizeRequest(model="m", chat=chat)
    assert of_tokenize(tokenize, b"").prompt.conversation == over_http.conversation


@pytest.mark.parametrize("field", ["chat.tools[0].parameters", "chat.template_kwargs"])
def test_what_json_cannot_say_is_refused_by_its_own_name(field: str) -> None:
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user")])
    where = chat.tools.add(name="f").parameters if "tools" in field else chat.template_kwargs
    where.fields["x"].number_value = float("nan")
    with pytest.raises(InvalidRequest) as refused:
        of_generate(inference_pb2.GenerateRequest(model="m", chat=chat), b"")
    assert [each.field for each in refused.value.fields] == [field]
