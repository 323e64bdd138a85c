"""Calls are parsed as templates write them in each format; drafts in thinking, and all that is no call, stay text."""

import json
import time
from functools import cache

import pytest

from inference_contract.tools import FunctionDefinition, ToolDefinition
from pipelinerl import rng
from pipelinerl.answers.thinking import openings_in
from pipelinerl.answers.tool_calls import FORMATS, ParsedAnswer, num_unparsed, parsed
from tests.fakes.call_templates import ALL_TEMPLATES, TOOLS, answers

SUM = ToolDefinition(
    type="function",
    function=FunctionDefinition(
        name="sum",
        parameters={
            "type": "object",
            "properties": {
                "a": {"type": "integer"},
                "unit": {"type": "string"},
                "zip": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "flag": {"type": "boolean"},
            },
        },
    ),
)
BY_NAME = {form.name: form for form in FORMATS}
HERMES, XML, LLAMA = BY_NAME["Hermes"], BY_NAME["Qwen3-Coder"], BY_NAME["Llama 3"]
#: Arguments with half a character, which JSON can spell.
HALF = {"unit": "\ud83d"}
CALL = '<tool_call>{"name": "sum", "arguments": {"a": 1}}</tool_call>'


def parse(text, form, key=b"k", opened_by=""):
    return parsed(text, form, [SUM], key=key, opened_by=opened_by)


def calls_of(answer):
    return [(call.function.name, json.loads(call.function.arguments)) for call in answer.calls]


openings_of = cache(lambda name: openings_in(ALL_TEMPLATES[name].source))


def read(answer, name, text=None):
    written = answer.text if text is None else text
    openings = openings_of(name)
    return parsed(written, BY_NAME[name], TOOLS, key=b"", opened_by=answer.opened_by, openings=openings)


def test_every_format_has_a_template():
    assert ALL_TEMPLATES.keys() == BY_NAME.keys()


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", BY_NAME)
def test_random_calls_are_parsed_as_the_template_writes_them(name, count):
    """Each random answer parses to what was written, and each cut one to a beginning of its calls."""
    cuts = rng.generator(1, name)
    for answer in answers(name, rng.generator(0, name), count):
        whole = read(answer, name)
        assert calls_of(whole) == answer.calls, answer.text
        assert whole.content.split() == answer.content.split(), answer.text
        cut = answer.text[: cuts.integers(0, len(answer.text) + 1)]
        got = calls_of(read(answer, name, cut))
        assert got == answer.calls[: len(got)], cut


@pytest.mark.parametrize(
    ("form", "text", "content", "arguments"),
    [
        ("Hermes", CALL, "", [{"a": 1}]),
        ("Hermes", f"So: {CALL}", "So:", [{"a": 1}]),
        ("Hermes", '<tool_call>{"name": "sum", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [{"a": 1}]),
        ("Hermes", '<tool_call>{"name": "sum", "arguments": {"unit": "</tool_call>"}}', "", [{"unit": "</tool_call>"}]),
        ("Hermes", '<tool_call>{"name": "sum", "arguments": {"unit": "\\ud83d"}}</tool_call>', "", [HALF]),
        (
            "Qwen3-Coder",
            "<tool_call>\n<function=sum>\n<parameter=a>\n1\n</parameter>\n</function>\n<function=sum>\n<parameter=zip>\n"
            "90210\n</parameter>\n<parameter=flag>\nTrue\n</parameter>\n</function>\n</tool_call>",
            "",
            [{"a": 1}, {"zip": "90210", "flag": True}],
        ),
        (
            "Qwen3-Coder",
            "<function=sum>\n<parameter=zip>\nnull\n</parameter>\n</function>\n</tool_call>",
            "",
            [{"zip": None}],
        ),
        (
            "Qwen3-Coder",
            "<tool_call><function=sum><parameter=unit>a</parameter>b\n</function></parameter></function></tool_call>",
            "",
            [{"unit": "a</parameter>b\n</function>"}],
        ),
        ("GLM", "<tool_call>sum<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", "", [{"a": 1}]),
        ("Seed-OSS", "<seed:tool_call><function=sum></function></seed:tool_call>", "", [{}]),
        ("gpt-oss", ' to=functions.sum<|channel|>commentary json<|message|>{"a": 1}', "", [{"a": 1}]),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.sum "
            '<|constrain|>json<|message|>{"a": 1}<|call|>',
            "<|channel|>analysis<|message|>Hm.<|end|>",
            [{"a": 1}],
        ),
        ("Mistral 3", '[TOOL_CALLS]sum{"a": 1}[TOOL_CALLS]sum[ARGS]{}', "", [{"a": 1}, {}]),
        (
            "Kimi K2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.sum:3<|tool_call_argument_begin|>"
            "<|tool_call_end|><|tool_calls_section_end|>",
            "",
            [{}],
        ),
        ("LFM2", '<|tool_call_start|>[sum(a=1, flag=True), sum()]<|tool_call_end|>', "", [{"a": 1, "flag": True}, {}]),
        (
            "Llama 3",
            '<|python_tag|>{"name": "sum", "parameters": {}}; {"name": "sum", "parameters": {"a": 2}}',
            "",
            [{}, {"a": 2}],
        ),
    ],
)  # fmt: skip
def test_variants_that_models_write_are_parsed(form, text, content, arguments):
    answer = parse(text, BY_NAME[form])
    assert answer.content == content
    assert calls_of(answer) == [("sum", each) for each in arguments]
    assert len({call.id for call in answer.calls}) == len(arguments)
    assert answer == parse(text, BY_NAME[form])
    assert answer.calls[0].id != parse(text, BY_NAME[form], b"other").calls[0].id


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("Hermes", "<tool_call>{broken</tool_call>"),
        ("Hermes", '<tool_call>{"name": "sum"}</tool_call>'),
        ("Hermes", '<tool_call>{"name": "sum", "arguments": {"a": '),
        ("Hermes", '<tool_call>{"name": "sum", "arguments": {"a": NaN}}</tool_call>'),
        ("Hermes", '<tool_call>{"name": "sum", "arguments": {"a": 1e999}}</tool_call>'),
        ("Hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("Hermes", "<tool_call>" + "[" * 100_000),
        ("Qwen3-Coder", "<tool_call><function=sum><parameter=a>1</tool_call>"),
        ("Qwen3-Coder", "<function=sum>\n<parameter=unit>\nWrite <function=f>\n</function>\n</tool_call>"),
        ("GLM", CALL),
        ("Mistral 3", "[TOOL_CALLS]sum[ARGS]"),
        ("gpt-oss", " to=functions.sum<|message|>"),
        ("Gemma 4", '<|tool_call>call:sum{unit:<|"|><|tool_call>call:sum{a:1}<tool_call|>'),
        ("LFM2", "<|tool_call_start|>[open('x').read()]<|tool_call_end|>"),
        ("Llama 3", 'I call {"name": "sum", "parameters": {}}'),
        ("Llama 3", '{"name": "sum", "parameters": {}} and more'),
    ],
)
def test_text_that_is_not_a_valid_tool_call_stays_text(form, text):
    assert parse(text, BY_NAME[form]) == ParsedAnswer(text)


@pytest.mark.parametrize(
    "marks", ["<think> </think>", "<seed:think> </seed:think>", "[THINK] [/THINK]", "◁think▷ ◁/think▷"]
)
def test_call_drafted_in_thinking_is_no_call_and_the_answer_is_kept(marks):
    opening, closing = marks.split()
    rest = f"I could run {CALL} but I know.{closing}\\boxed{{4}}"
    assert parse(opening + rest, HERMES) == ParsedAnswer(opening + rest)
    assert parse(rest, HERMES, opened_by=opening) == ParsedAnswer(rest)
    assert parse(rest, HERMES) == ParsedAnswer(rest), "a closing marker alone ends thinking that the prompt opened"
    assert calls_of(parse(f"{rest}{CALL}", HERMES)) == [("sum", {"a": 1})]
    assert parse(opening + CALL, HERMES).calls == (), "the thinking has no end"
    assert parse(CALL, HERMES, opened_by=opening) == ParsedAnswer(CALL)
    assert parse('{"name": "sum", "parameters": {}}', LLAMA, opened_by=opening).calls == ()


def test_llama_call_may_follow_thinking_and_contain_its_markers():
    answer = parse(
        '<think>{"name": "sum", "parameters": {}}</think>\n{"name": "sum", "parameters": {"unit": "</think>"}}', LLAMA
    )
    assert calls_of(answer) == [("sum", {"unit": "</think>"})] and answer.content.endswith("</think>")


def test_unparsed_calls_are_counted_outside_thinking_once_each():
    text = "<think><tool_call></think> <tool_call><function=f> [TOOL_CALLS] <|tool_call_begin|> <|python_tag|>"
    assert num_unparsed(text) == 4
    assert num_unparsed('{"name": "f", ') == 1 and num_unparsed("{} <function> a [call]") == 0


def test_call_that_is_cut_off_is_counted_as_unparsed():
    for name in BY_NAME:
        written = next(each for each in answers(name, rng.generator(5), 99) if each.calls and not each.opened_by)
        text = written.text[len(written.content) :] if written.text.startswith(written.content) else written.text
        assert num_unparsed(text[: len(text) // 2]) >= 1, text


@pytest.mark.parametrize(
    "piece",
    ["<tool_call>", "<function=f><parameter=a>", " ", "<think>", "</think>", "a ", "[TOOL_CALLS][", "<|channel|>a "],
)
def test_answer_that_repeats_a_piece_is_parsed_in_linear_time(piece):
    began = time.process_time()
    for form in FORMATS:
        parse(piece * 5000, form)
    num_unparsed(piece * 5000)
    assert time.process_time() - began < 3.0
