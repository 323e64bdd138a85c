"""Tool calls are parsed in the three supported formats, and all other text stays text."""

from __future__ import annotations

import json

import pytest

from inference_contract.tools import FunctionDefinition, ToolDefinition
from pipelinerl.models.tool_calls import CallFormat, ParsedAnswer, format_of, parsed

SUM = ToolDefinition(
    type="function",
    function=FunctionDefinition(
        name="sum", parameters={"type": "object", "properties": {"a": {"type": "integer"}, "unit": {"type": "string"}}}
    ),
)
HERMES, XML, LLAMA = CallFormat.HERMES, CallFormat.QWEN3_XML, CallFormat.LLAMA_JSON


def parse(text: str, form: CallFormat, key: bytes = b"k") -> ParsedAnswer:
    return parsed(text, form, [SUM], key=key)


@pytest.mark.parametrize(
    ("form", "text", "content", "arguments"),
    [
        (HERMES, '<tool_call>\n{"name": "sum", "arguments": {"a": 1}}\n</tool_call>', "", [{"a": 1}]),
        (HERMES, 'So: <tool_call>{"name": "sum", "arguments": {"a": 1}}</tool_call>', "So:", [{"a": 1}]),
        (HERMES, 2 * '<tool_call>{"name": "sum", "arguments": {}}</tool_call>', "", [{}, {}]),
        (
            XML,
            "<tool_call>\n<function=sum>\n<parameter=a>\n1\n</parameter>\n<parameter=unit>\n7\n</parameter>\n"
            "</function>\n</tool_call>",
            "",
            [{"a": 1, "unit": "7"}],
        ),
        (LLAMA, '{"name": "sum", "parameters": {"a": 1}}', "", [{"a": 1}]),
        (
            LLAMA,
            '<|python_tag|>{"name": "sum", "parameters": {}}; {"name": "sum", "parameters": {"a": 2}}',
            "",
            [{}, {"a": 2}],
        ),
    ],
)
def test_tool_calls_are_parsed_in_each_format(
    form: CallFormat, text: str, content: str, arguments: list[object]
) -> None:
    answer = parse(text, form)
    assert answer.content == content
    assert [(call.function.name, json.loads(call.function.arguments)) for call in answer.calls] == [
        ("sum", each) for each in arguments
    ]
    assert len({call.id for call in answer.calls}) == len(arguments)
    assert answer == parse(text, form) and answer.calls[0].id != parse(text, form, b"other").calls[0].id


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, "<tool_call>{broken</tool_call>"),
        (HERMES, '<tool_call>{"name": "sum"}</tool_call>'),
        (HERMES, '<tool_call>{"name": "sum", "arguments": {"a": '),
        (HERMES, "[" * 100_000),
        (XML, "<tool_call><function=sum><parameter=a>1</tool_call>"),
        (LLAMA, 'I call {"name": "sum", "parameters": {}}'),
        (LLAMA, '{"name": "sum", "parameters": {}} and more'),
    ],
)
def test_text_that_is_not_a_valid_tool_call_stays_text(form: CallFormat, text: str) -> None:
    assert parse(text, form) == ParsedAnswer(text)


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ '<tool_call>' }}", HERMES),
        ("<tool_call><function={{ name }}>", XML),
        ("""{{ '{"name": "' + tool_calls[0].name + '", "parameters": ' }}""", LLAMA),
        ("{{ message.content }}", None),
    ],
)
def test_tool_call_format_follows_the_chat_template(template: str, form: CallFormat | None) -> None:
    assert format_of(template) is form
