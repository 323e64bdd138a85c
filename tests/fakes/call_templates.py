"""Small chat templates, one for each format of tool calls, and random answers that they write.

Each template has the structure that the models' own templates have for calls; all else is as plain as possible.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from inference_contract.tools import ToolDefinition
from pipelinerl.models.tokenizer import compiled

_JSON: Final = "c.function.arguments | tojson"
_TEXT: Final = "c.function.arguments"
_VALUE: Final = "v if v is string else v | tojson"


@dataclass(frozen=True)
class CallTemplate:
    """How a template writes calls: Jinja before, for each, between and after them, and the markers of its thinking.

    `quote` is a text that no argument can contain. `most` is the largest number of calls of an answer; `has_text` is
    False if nothing may stand next to the calls.
    """

    each: str
    begin: str = ""
    between: str = ""
    end: str = ""
    thinking: tuple[str, str] = ("<think>\n", "\n</think>\n\n")
    after: str = ""
    quote: str = ""
    most: int = 3
    has_text: bool = True

    @property
    def calls(self):
        """The part of the template that writes a message's calls."""
        between = "{% if not loop.last %}{{- '" + self.between + "' }}{% endif %}" if self.between else ""
        return (
            "{%- if m.tool_calls %}" + self.begin + "{%- for c in m.tool_calls %}" + self.each + between
            + "{%- endfor %}" + self.end + "{%- endif %}"
        )  # fmt: skip

    @property
    def source(self):
        """The whole chat template, which opens no thinking in the prompt."""
        return (
            "{%- for t in tools or [] %}{{- t | tojson }}{{- '<|end|>' }}{%- endfor %}{%- for m in messages %}"
            "{{- '<|' + m.role + '|>' }}{%- if m.tool_call_id %}{{- m.tool_call_id + ':' }}{%- endif %}"
            "{%- if m.reasoning_content %}{{- '" + self.thinking[0].replace("\n", "\\n") + "' + m.reasoning_content + '"
            + self.thinking[1].replace("\n", "\\n") + "' }}{%- endif %}{{- m.content }}" + self.calls
            + "{{- '<|end|>' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
        )  # fmt: skip


def _json_object(arguments="arguments", name="name"):
    begin = "{{- '{\"" + name + '": "\' + c.function.name + \'", "' + arguments + "\": ' }}"
    return begin + "{{- " + _JSON + " }}{{- '}' }}"


def _tagged(begin, parameter, end, value=_VALUE):
    return (
        "{{- " + begin + " }}{%- for k, v in c.function.arguments | items %}"
        + parameter.replace("VALUE", "{{- " + value + " }}") + "{%- endfor %}{{- '" + end + "' }}"
    )  # fmt: skip


_XML_PARAMETER: Final = "{{- '<parameter=' + k + '>' }}VALUE{{- '</parameter>\\n' }}"
_DSML: Final = "｜DSML｜"
TEMPLATES: Final[Mapping[str, CallTemplate]] = {
    "Hermes": CallTemplate("{{- '<tool_call>\\n' }}" + _json_object() + "{{- '\\n</tool_call>' }}", between="\\n"),
    "Qwen3-Coder": CallTemplate(
        _tagged(
            "'<tool_call>\\n<function=' + c.function.name + '>\\n'",
            "{{- '<parameter=' + k + '>\\n' }}VALUE{{- '\\n</parameter>\\n' }}",
            "</function>\\n</tool_call>",
        ),
        between="\\n",
    ),
    "GLM": CallTemplate(
        _tagged(
            "'<tool_call>' + c.function.name + '\\n'",
            "{{- '<arg_key>' + k + '</arg_key>\\n<arg_value>' }}VALUE{{- '</arg_value>\\n' }}",
            "</tool_call>",
        )
    ),
    "Seed-OSS": CallTemplate(
        _tagged(
            "'<seed:tool_call>\\n<function=' + c.function.name + '>\\n'",
            _XML_PARAMETER,
            "</function>\\n</seed:tool_call>",
            "v if v is string else v | string",
        ),
        thinking=("<seed:think>", "</seed:think>\n"),
    ),
    "MiniMax": CallTemplate(
        _tagged(
            "'<invoke name=\"' + c.function.name + '\">\\n'",
            "{{- '<parameter name=\"' + k + '\">' }}VALUE{{- '</parameter>\\n' }}",
            "</invoke>\\n",
        ),
        begin="{{- '<minimax:tool_call>\\n' }}",
        end="{{- '</minimax:tool_call>' }}",
    ),
    "DeepSeek V3.2": CallTemplate(
        _tagged(
            f"'<{_DSML}invoke name=\"' + c.function.name + '\">\\n'",
            f"{{{{- '<{_DSML}parameter name=\"' + k + '\" string=\"' }}}}"
            "{{- 'true' if v is string else 'false' }}{{- '\">' }}"
            f"VALUE{{{{- '</{_DSML}parameter>\\n' }}}}",
            f"</{_DSML}invoke>\\n",
        ),
        begin=f"{{{{- '<{_DSML}function_calls>\\n' }}}}",
        end=f"{{{{- '</{_DSML}function_calls>' }}}}",
    ),
    "DeepSeek V3": CallTemplate(
        "{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' + " + _TEXT
        + " + '\\n```<｜tool▁call▁end｜>' }}",
        begin="{{- '<｜tool▁calls▁begin｜>' }}",
        between="\\n",
        end="{{- '<｜tool▁calls▁end｜>' }}",
    ),
    "DeepSeek V3.1": CallTemplate(
        "{{- '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + " + _TEXT + " + '<｜tool▁call▁end｜>' }}",
        begin="{{- '<｜tool▁calls▁begin｜>' }}",
        end="{{- '<｜tool▁calls▁end｜>' }}",
    ),
    "Mistral": CallTemplate(
        _json_object() + "",
        begin="{{- '[TOOL_CALLS] [' }}",
        between=", ",
        end="{{- ']' }}",
        thinking=("[THINK]", "[/THINK]"),
    ),
    "Mistral 3": CallTemplate(
        "{{- '[TOOL_CALLS]' + c.function.name + '[CALL_ID]' + c.id + '[ARGS]' }}{{- " + _JSON + " }}",
        thinking=("[THINK]", "[/THINK]"),
    ),
    "Kimi K2": CallTemplate(
        "{{- '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' }}{{- " + _JSON + " }}"
        "{{- '<|tool_call_end|>' }}",
        begin="{{- '<|tool_calls_section_begin|>' }}",
        end="{{- '<|tool_calls_section_end|>' }}",
        thinking=("◁think▷", "◁/think▷"),
    ),
    "gpt-oss": CallTemplate(
        "{{- '<|start|>assistant<|channel|>commentary to=functions.' + c.function.name }}"
        "{{- ' <|constrain|>json<|message|>' }}"
        "{{- " + _JSON + " }}",
        thinking=("<|channel|>analysis<|message|>", "<|end|>"),
        most=1,
        has_text=False,
    ),
    "Gemma 4": CallTemplate(
        "{%- macro of(v) %}{%- if v is string %}{{- '<|\"|>' + v + '<|\"|>' }}{%- elif v is boolean %}"
        "{{- 'true' if v else 'false' }}{%- elif v is mapping %}{{- '{' }}{%- for k, w in v | items %}{{- k + ':' }}"
        "{{- of(w) }}{{- '' if loop.last else ',' }}{%- endfor %}{{- '}' }}{%- elif v is iterable %}{{- '[' }}"
        "{%- for w in v %}{{- of(w) }}{{- '' if loop.last else ',' }}{%- endfor %}{{- ']' }}{%- else %}{{- v }}"
        "{%- endif %}{%- endmacro %}"
        "{{- '<|tool_call>call:' + c.function.name }}{{- of(c.function.arguments) }}{{- '<tool_call|>' }}",
        thinking=("<|channel>thought\n", "<channel|>"),
        quote='<|"|>',
    ),
    "Phi and Granite 3": CallTemplate(
        _json_object(), begin="{{- '<|tool_call|>[' }}", between=", ", end="{{- ']<|/tool_call|>' }}"
    ),
    "Cohere": CallTemplate(
        _json_object("parameters", "tool_name"),
        begin="{{- '<|START_ACTION|>[\\n' }}",
        between=",\\n",
        end="{{- ']<|END_ACTION|>' }}",
        thinking=("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    "Nemotron": CallTemplate(
        _json_object(), begin="{{- '<TOOLCALL>[' }}", between=", ", end="{{- ']</TOOLCALL>' }}"
    ),
    "LFM2 in JSON": CallTemplate(
        _json_object(), begin="{{- '<|tool_call_start|>[' }}", between=", ", end="{{- ']<|tool_call_end|>' }}"
    ),
    "LFM2": CallTemplate(
        "{{- c.function.name + '(' }}{%- for k, v in c.function.arguments | items %}{{- k + '=' }}{{- v | tojson }}"
        "{{- '' if loop.last else ', ' }}{%- endfor %}{{- ')' }}",
        begin="{{- '<|tool_call_start|>[' }}",
        between=", ",
        end="{{- ']<|tool_call_end|>' }}",
    ),
    "Llama 3": CallTemplate(_json_object("parameters"), most=1, has_text=False),
}  # fmt: skip
#: FunctionGemma's calls are Gemma 4's with other markers.
_GEMMA: Final = TEMPLATES["Gemma 4"]
FUNCTION_GEMMA: Final = CallTemplate(
    _GEMMA.each.replace('<|"|>', "<escape>")
    .replace("<|tool_call>", "<start_function_call>")
    .replace("<tool_call|>", "<end_function_call>"),
    quote="<escape>",
)
ALL_TEMPLATES: Final = {**TEMPLATES, "FunctionGemma": FUNCTION_GEMMA}

# --- random answers ---------------------------------------------------------------------------------------------------

_SCHEMAS: Final[Mapping[str, Any]] = {
    "text": {"type": "string"},
    "zip_code": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "count": {"type": "integer"},
    "ratio": {"type": ["number", "null"]},
    "flag": {"type": "boolean"},
    "items": {"$ref": "#/$defs/Items"},
    "nested": {"type": "object"},
}
_NAMES: Final = ("python", "get_weather", "search_web")
TOOLS: Final = [
    ToolDefinition.model_validate(
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": dict(_SCHEMAS),
                    "$defs": {"Items": {"type": "array", "items": {}}},
                },
            },
        }
    )
    for name in _NAMES
]
#: Pieces of random texts: what JSON and XML escape, what is no ASCII, and every format's markers.
_PIECES: Final = (
    '"', "\\", "\\n", "\n", "\t", "'", "{", "}", "[", "]", ",", ":", "é", "日", "😀", " ", "90210", "null", "True", "<",
    "<think>", "</think>", "[THINK]", "<|channel>thought", "</tool_call>", "<tool_call>", "</parameter>", "</function>",
    "<function=f>", "</arg_value>", "</invoke>", "<｜tool▁call▁end｜>", "[TOOL_CALLS]", "<|tool_call_end|>",
    "<tool_call|>", "<|message|>", "<end_function_call>", "```", "<|END_ACTION|>", "</TOOLCALL>", "[ARGS]",
    f"</{_DSML}parameter>", "</seed:tool_call>",
)  # fmt: skip

Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class WrittenAnswer:
    """A random answer: its text, the marker with which the prompt opened thinking, and what it means."""

    text: str
    opened_by: str
    content: str
    calls: list[Call]


def answers(name, rng, count):
    """Yield random answers in a format: with and without text, thinking before and after, drafts in it, and calls."""
    form = ALL_TEMPLATES[name]
    template = compiled("{%- set m = messages[0] %}" + form.calls)
    for _ in range(count):
        yield _answer(form, lambda calls: _write(template.render, calls), rng)


def _answer(form, write, rng):
    calls = [_call(rng, form.quote) for _ in range(rng.integers(0, form.most + 1))]
    before, opens = rng.random() < 0.6, rng.random() < 0.5
    text = ("", "So: ", "I look. \n")[rng.integers(3)] if form.has_text or not calls else ""
    opening, closing = form.thinking
    thinking, opened_by = "", ""
    if before:
        draft = write([_call(rng, form.quote)])
        shown = "" if opens and form.most > 1 else opening
        opened_by = opening.strip() if not shown else ""
        thinking = f"{shown}I could run {draft} but ...{closing}"
    written = write(calls) if calls else ""
    after = ""
    if form.has_text and rng.random() < 0.3:  # a closing marker in this draft would make drafts of all calls before it
        after = f"{opening}Done? {write([_call(rng, form.quote, closing.strip())])}{closing}"
    content = thinking + text + after
    return WrittenAnswer(thinking + text + written + after, opened_by, content, calls)


def _write(render, calls):
    shown = [
        {"id": f"functions.{name}:{place}", "function": {"name": name, "arguments": _Arguments(arguments)}}
        for place, (name, arguments) in enumerate(calls)
    ]
    return render(messages=[{"tool_calls": shown}])


class _Arguments(dict[str, Any]):
    """Arguments that a template may also append to a text, as DeepSeek's templates do."""

    def __radd__(self, other):
        return other + json.dumps(self, ensure_ascii=False)


def _call(rng, *without):
    names = [name for name in _SCHEMAS if rng.random() < 0.5]
    make = {
        "text": lambda: _text(rng, without),
        "zip_code": lambda: [None, "90210", _text(rng, without) + "."][rng.integers(3)],
        "count": lambda: int(rng.integers(-9, 10**9)),
        "ratio": lambda: [None, 0.5, 1e-07, 3][rng.integers(4)],
        "flag": lambda: bool(rng.integers(2)),
        "items": lambda: [_value(rng, without, 1) for _ in range(rng.integers(3))],
        "nested": lambda: _value(rng, without, 2, only_object=True),
    }
    return _NAMES[rng.integers(len(_NAMES))], {name: make[name]() for name in names}


def _value(rng, without, depth, *, only_object=False):
    kind = 6 if only_object else rng.integers(0, 7 if depth else 5)
    if kind == 5:
        return [_value(rng, without, depth - 1) for _ in range(rng.integers(3))]
    if kind == 6:
        return {f"k{place}": _value(rng, without, depth - 1) for place in range(rng.integers(3))}
    return [None, True, 7, -2.5, _text(rng, without)][kind]


def _text(rng, without):
    """Return random pieces, with a letter between two of them: a text of closing tags alone is ambiguous in XML."""
    pieces = (_PIECES[at] for at in rng.integers(len(_PIECES), size=rng.integers(5)))
    return "x".join(piece for piece in pieces if piece not in without)
