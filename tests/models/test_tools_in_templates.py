"""Tools, calls and their results are rendered by the chat template, and none of their texts becomes a control token."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from inference_contract.schemas import ChatMessage
from inference_contract.tools import ToolDefinition
from pipelinerl.errors import ModelError, UnshownFieldError
from pipelinerl.models.tokenizer import ChatTokenizer
from tests.models.test_control_tokens import CHATML_TOKENS, byte_level, guarded

#: As Hermes' and Qwen's: calls and results stand between tokens of their own.
TOOL_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
TOOL_TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\n# Tools\n' }}{%- for tool in tools %}{{- tool | tojson + '\n' }}"
    "{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}"
    "{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.reasoning_content %}{{- '<think>\n' + m.reasoning_content + '\n</think>\n' }}{%- endif %}{{- m.content }}"
    '{%- for call in m.tool_calls %}{{- \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
    "{{- '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
RAW = byte_level(TOOL_TEMPLATE, CHATML_TOKENS, "<|im_end|>", *TOOL_TOKENS)
TOKENIZER = guarded(RAW)
CONTROL = frozenset({*CHATML_TOKENS, *TOOL_TOKENS})


def tool(name: str = "add", description: str = "Add", parameters: dict[str, Any] | None = None) -> ToolDefinition:
    function = {"name": name, "description": description, "parameters": parameters or {"type": "object"}}
    return ToolDefinition.model_validate({"type": "function", "function": function})


def call(arguments: str, name: str = "add", call_id: str = "call_1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def conversation(*, arguments: str = '{"a": 1}', result: str = "3", thinking: str = "Hm.") -> list[ChatMessage]:
    bodies: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "1 + 2"},
        {"role": "assistant", "content": None, "tool_calls": [call(arguments)], "reasoning_content": thinking},
        {"role": "tool", "tool_call_id": "call_1", "content": result},
    ]
    return [ChatMessage.model_validate(body) for body in bodies]


def control_tokens(ids: list[int]) -> list[str]:
    return [token for token in RAW.convert_ids_to_tokens(ids) if token in CONTROL]


def test_template_sees_tools_calls_and_results() -> None:
    ids = TOKENIZER.encode_chat(conversation(), tools=[tool()])
    assert RAW.decode(ids) == (
        "<|im_start|>system\n# Tools\n"
        '{"type": "function", "function": {"name": "add", "description": "Add", "parameters": {"type": "object"}}}\n'
        "<|im_end|>\n<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 + 2<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nHm.\n</think>\n\n<tool_call>\n"
        '{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("spelled", ["<|im_end|>", "<|im_start|>", "</tool_response>", "</tool_call>"])
@pytest.mark.parametrize(
    "place", ["result", "argument", "argument's name", "unparsed arguments", "name", "description", "parameter"]
)
def test_control_token_spelled_in_data_stays_text(spelled: str, place: str) -> None:
    messages, tools = conversation(), [tool()]
    if place == "result":
        messages = conversation(result=f"x{spelled}y")
    elif place == "argument":
        messages = conversation(arguments=json.dumps({"a": [f'"{spelled}"']}))
    elif place == "argument's name":
        messages = conversation(arguments=json.dumps({spelled: 1}))
    elif place == "unparsed arguments":
        messages = conversation(arguments=f"{{{spelled}")
    elif place == "name":
        tools = [tool(name=spelled)]
    elif place == "description":
        tools = [tool(description=f"Add.{spelled}\n")]
    else:
        tools = [tool(parameters={"type": "object", "properties": {spelled: {"enum": [spelled]}}})]
    ids = TOKENIZER.encode_chat(messages, tools=tools)
    assert control_tokens(ids) == control_tokens(TOKENIZER.encode_chat(conversation(), tools=[tool()]))
    assert spelled in RAW.decode(ids).replace('\\"', '"')


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(
        st.lists(st.sampled_from([*CONTROL, "<|", "a", '"', "\n", "é"])).map("".join), min_size=4, max_size=4
    )
)
def test_no_data_becomes_a_control_token(texts: list[str]) -> None:
    result, argument, name, description = texts
    messages = conversation(arguments=json.dumps({argument: argument}), result=result)
    ids = TOKENIZER.encode_chat(messages, tools=[tool(name=f"a{name}", description=description)])
    assert control_tokens(ids) == control_tokens(TOKENIZER.encode_chat(conversation(), tools=[tool()]))


def test_assistants_thinking_may_hold_inner_tokens_but_no_structural_ones() -> None:
    ids = TOKENIZER.encode_chat(conversation(thinking="<tool_call><|im_end|>"), tools=[tool()])
    expected = control_tokens(TOKENIZER.encode_chat(conversation(), tools=[tool()]))
    expected.insert(expected.index("<think>") + 1, "<tool_call>")
    assert control_tokens(ids) == expected


@pytest.mark.parametrize("arguments", ["", "{", "[1]", '{"a": ' * 5000 + "1" + "}" * 5000])
def test_arguments_that_are_no_object_are_shown_as_they_are(arguments: str) -> None:
    shown = RAW.decode(TOKENIZER.encode_chat(conversation(arguments=arguments), tools=[tool()]))
    assert f'"arguments": {arguments}}}\n</tool_call>' in shown


def test_template_without_a_place_for_a_field_refuses_it_by_name() -> None:
    plain: ChatTokenizer = guarded(
        byte_level("{% for m in messages %}{{ m.content }}{% endfor %}", CHATML_TOKENS, "<|im_end|>")
    )
    user = [ChatMessage(role="user", content="a")]
    with pytest.raises(UnshownFieldError, match="does not look at tools") as tools:
        plain.encode_chat(user, tools=[tool()])
    assert tools.value.place == "tools"
    with pytest.raises(UnshownFieldError) as calls:
        plain.encode_chat(conversation())
    assert calls.value.place == "messages.2.tool_calls"


def test_untrackable_spelling_in_a_tool_names_its_place() -> None:
    template = TOOL_TEMPLATE.replace("tool | tojson", "tool | tojson | urlencode")
    encoding = guarded(byte_level(template, CHATML_TOKENS, "<|im_end|>", *TOOL_TOKENS))
    with pytest.raises(ModelError, match=r"tools\.0\.function\.description spells a control token"):
        encoding.encode_chat(conversation(), tools=[tool(description="<|im_end|>")])
