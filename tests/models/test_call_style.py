"""A template's format of tool calls is the one in which its calls parse back, whatever its source mentions."""

import pytest

from inference_contract.schemas import ChatMessage
from pipelinerl.errors import UnshownFieldError
from tests.fakes.call_templates import ALL_TEMPLATES, TOOLS
from tests.fakes.tool_model import TOOL_TEMPLATE, tool_tokenizer
from tests.models.test_control_tokens import guarded

TOOL = TOOLS[0]


def tokenizer(template):
    return guarded(tool_tokenizer(template=template))


def conversation(arguments='{"text": "a\\"b"}'):
    calls = [
        {"id": f"id{number}", "type": "function", "function": {"name": "python", "arguments": arguments}}
        for number in range(2)
    ]
    bodies = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *({"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in calls),
    ]
    return [ChatMessage.model_validate(body) for body in bodies]


@pytest.mark.parametrize("name", ALL_TEMPLATES)
def test_format_is_found_by_rendering_a_call_and_parsing_it_back(name):
    style = tokenizer(ALL_TEMPLATES[name].source).check_calls()
    assert style.form.name == name
    assert style.arguments_are_text == (name in ("DeepSeek V3", "DeepSeek V3.1"))
    assert style.ids_name_functions == (name == "Kimi K2")


@pytest.mark.parametrize("name", ALL_TEMPLATES)
@pytest.mark.parametrize("opens", ["", "<think>\n"])
def test_written_call_parses_back_after_the_prompt(name, opens):
    source = ALL_TEMPLATES[name].source.replace(
        "{{- '<|assistant|>' }}", "{{- '<|assistant|>" + opens.replace("\n", "\\n") + "' }}"
    )
    made = tokenizer(source)
    prompt = made.encode_chat(conversation()[:1], tools=[TOOL])
    text = made.written_call("python", {"text": "1 < 2\n"})
    (call,) = made.parse_answer(text, [TOOL], prompt_token_ids=prompt, key=b"").calls
    assert (call.function.name, call.function.arguments) == ("python", '{"text": "1 < 2\\n"}')


def test_template_that_describes_one_format_and_writes_another_has_the_written_one():
    described = "{#- answer with <tool_call> and <function= #}" + ALL_TEMPLATES["Seed-OSS"].source
    assert tokenizer(described).check_calls().form.name == "Seed-OSS"


def test_template_that_appends_arguments_to_a_text_gets_them_as_text():
    made = tokenizer(ALL_TEMPLATES["DeepSeek V3.1"].source)
    assert '<｜tool▁sep｜>{"text": "a\\"b"}<｜tool▁call▁end｜>' in made.decode(made.encode_chat(conversation()))
    assert "<｜tool▁sep｜>{}<｜tool▁call▁end｜>" in made.decode(made.encode_chat(conversation("")))
    assert made.tail.reproduces_deployment(calls=2)


def test_template_that_names_functions_only_in_ids_gets_such_ids():
    made = tokenizer(ALL_TEMPLATES["Kimi K2"].source)
    shown = made.decode(made.encode_chat(conversation()))
    for number in range(2):
        assert f"<|tool_call_begin|>functions.python:{number}<|tool_call_argument_begin|>" in shown
        assert f"<|tool|>functions.python:{number}:3" in shown, "results refer to the same ids"
    assert made.tail.reproduces_deployment(calls=2)


def test_tools_are_rejected_if_calls_of_the_template_cannot_be_parsed_back():
    unknown = TOOL_TEMPLATE.replace("<tool_call>", "<do>").replace("</tool_call>", "</do>")
    for template in (unknown, TOOL_TEMPLATE.replace("call.function.name", "'f'")):
        made = tokenizer(template)
        assert made.call_style is None
        with pytest.raises(UnshownFieldError, match=r"cannot be parsed back, .*; serve a model .*Hermes") as error:
            made.encode_chat(conversation()[:1], tools=[TOOL])
        assert error.value.place == "tools"
        made.encode_chat(conversation())  # a conversation with calls can still be rendered


def test_draft_in_thinking_that_the_prompt_opens_is_no_call():
    made = tokenizer(TOOL_TEMPLATE.replace("'<|assistant|>' }}{%- endif", "'<|assistant|><think>\\n' }}{%- endif"))
    prompt = made.encode_chat(conversation()[:1], tools=[TOOL])
    draft = made.written_call("python", {}).removeprefix("</think>")
    for text in (f"I could {draft}", f"I could {draft} but\n</think>\n\n4"):
        assert made.parse_answer(text, [TOOL], prompt_token_ids=prompt, key=b"").calls == ()
    text = f"I could {draft} but\n</think>\n\n{draft}"
    assert len(made.parse_answer(text, [TOOL], prompt_token_ids=prompt, key=b"").calls) == 1
