"""The chat template renders tools, calls and their results, and none of their texts becomes a control token."""

import json

import pytest
from hypothesis import given, settings, strategies as st

from inference_contract.schemas import ChatMessage
from inference_contract.tools import ToolDefinition
from pipelinerl.errors import ModelError, UnshownFieldError
from pipelinerl.plugins.warmstart.tiny_decoder import SPECIAL_TOKENS
from tests.fakes.tool_model import TOOL_TEMPLATE, TOOL_TOKENS, tool_tokenizer
from tests.models.test_control_tokens import guarded

RAW = tool_tokenizer()
TOKENIZER = guarded(RAW)
CONTROL = frozenset({*SPECIAL_TOKENS, *TOOL_TOKENS})


def tool(name="add", description="Add", parameters=None):
    function = {"name": name, "description": description, "parameters": parameters or {"type": "object"}}
    return ToolDefinition.model_validate({"type": "function", "function": function})


def call(arguments, name="add", call_id="call_1"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def conversation(*, arguments='{"a": 1}', result="3", thinking="Hm."):
    bodies = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "1 + 2"},
        {"role": "assistant", "content": None, "tool_calls": [call(arguments)], "reasoning_content": thinking},
        {"role": "tool", "tool_call_id": "call_1", "content": result},
    ]
    return [ChatMessage.model_validate(body) for body in bodies]


def control_tokens(ids):
    return [token for token in RAW.convert_ids_to_tokens(ids) if token in CONTROL]


def test_chat_template_renders_tools_calls_and_results():
    ids = TOKENIZER.encode_chat(conversation(), tools=[tool()])
    assert RAW.decode(ids) == (
        "<|system|># Tools\n"
        '{"type": "function", "function": {"name": "add", "description": "Add", "parameters": {"type": "object"}}}\n'
        "<|end|><|system|>Be brief.<|end|><|user|>1 + 2<|end|>"
        "<|assistant|><think>\nHm.\n</think>\n<tool_call>\n"
        '{"name": "add", "arguments": {"a": 1}}\n</tool_call><|end|>'
        "<|user|><tool_response>\n3\n</tool_response><|end|><|assistant|>"
    )


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(
        st.lists(st.sampled_from([*CONTROL, "<|", "a", '"', "\n", "é"]), max_size=12).map("".join),
        min_size=5,
        max_size=5,
    ),
    parsed=st.booleans(),
)
def test_random_tool_data_never_becomes_a_control_token(texts, parsed):
    result, argument, name, description, parameter = texts
    arguments = json.dumps({argument: [f'"{argument}"']}) if parsed else f"{{{argument}"
    parameters = {"type": "object", "properties": {parameter: {"enum": [parameter]}}}
    tools = [tool(name=f"a{name}", description=description, parameters=parameters)]
    ids = TOKENIZER.encode_chat(conversation(arguments=arguments, result=f"x{result}y"), tools=tools)
    assert control_tokens(ids) == control_tokens(TOKENIZER.encode_chat(conversation(), tools=[tool()]))
    assert f"x{result}y" in RAW.decode(ids)


def test_assistants_thinking_may_contain_the_tool_call_token_but_no_token_that_ends_a_turn():
    ids = TOKENIZER.encode_chat(conversation(thinking="<tool_call><|end|>"), tools=[tool()])
    expected = control_tokens(TOKENIZER.encode_chat(conversation(), tools=[tool()]))
    expected.insert(expected.index("<think>") + 1, "<tool_call>")
    assert control_tokens(ids) == expected


def test_empty_tool_arguments_are_rendered_as_an_empty_object():
    shown = RAW.decode(TOKENIZER.encode_chat(conversation(arguments=" "), tools=[tool()]))
    assert '"arguments": {}}\n</tool_call>' in shown


@pytest.mark.parametrize("arguments", ["{", "[1]", '{"a": ' * 5000 + "1" + "}" * 5000])
def test_tool_arguments_that_are_not_an_object_are_rendered_unchanged(arguments):
    shown = RAW.decode(TOKENIZER.encode_chat(conversation(arguments=arguments), tools=[tool()]))
    assert f'"arguments": {arguments}}}\n</tool_call>' in shown


def test_chat_field_that_the_template_does_not_render_is_rejected_by_name():
    plain = guarded(tool_tokenizer(template="{% for m in messages %}{{ m.content }}{% endfor %}"))
    user = [ChatMessage(role="user", content="a")]
    with pytest.raises(UnshownFieldError, match="does not use tools") as tools:
        plain.encode_chat(user, tools=[tool()])
    assert tools.value.place == "tools"
    with pytest.raises(UnshownFieldError) as calls:
        plain.encode_chat(conversation())
    assert calls.value.place == "messages.2.tool_calls"


def test_error_names_the_tool_field_that_contains_a_control_token_as_text():
    template = TOOL_TEMPLATE.replace("tool | tojson", "tool | tojson | urlencode")
    encoding = guarded(tool_tokenizer(template=template))
    with pytest.raises(ModelError, match=r"tools\.0\.function\.description spells a control token"):
        encoding.encode_chat(conversation(), tools=[tool(description="<|end|>")])
