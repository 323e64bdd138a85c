"""Parser of the tool calls in an answer, in the formats that chat templates write.

`FORMATS` is the table of formats: how a call begins, who reads what follows, and how it ends. A call counts only if the
model wrote it outside its thinking. Calls that cannot be parsed stay in the text, where the agent can see them.

    thinking, or a draft of a call in it      skipped
    a call that parses                        taken out of the text; markers within its arguments are data
    a call that does not parse, or is cut     text
    a closing marker of thinking, alone       all before it was thinking: its calls are drafts
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from inference_contract.tools import FunctionCall, ToolCall, ToolDefinition
from pipelinerl.answers.arguments import CutOff, braced, json_value, python_calls, typed
from pipelinerl.answers.thinking import OPENINGS, end_of_thinking, markers, split

#: Length of a tool call's id; Mistral's templates accept only ids of nine letters and digits.
_ID_LENGTH: Final = 9
#: Maximum number of openings that are no calls, after which the rest of an answer is text: a model that repeats an
#: opening thousands of times would cost quadratic time.
_MOST_FAILURES: Final = 64
#: Names under which formats in JSON write a function's name, and its arguments.
_NAMES: Final = ("name", "tool_name")
_ARGUMENTS: Final = ("arguments", "parameters")

#: Parameters' schemas of the offered tools, by the tools' names.
Schemas = Mapping[str, Mapping[str, Any]]
#: Function that reads the calls after an opening; returns them and their end. Raises ValueError if there are none.
Body = Callable[[str, "re.Match[str]", Schemas], tuple[list[FunctionCall], int]]


@dataclass(frozen=True)
class CallFormat:
    """A format of tool calls.

    `opening` and `closing` are regular expressions; `body` reads the text between them. With `fills_answer`, the text
    after the thinking must consist of calls alone.
    """

    name: str
    opening: str
    body: Body
    closing: str = ""
    fills_answer: bool = False

    @cached_property
    def end(self) -> re.Pattern[str]:
        """Matches what follows the body."""
        return re.compile(rf"\s*(?:{self.closing})")


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An answer's tool calls, and its text outside these calls."""

    content: str
    calls: tuple[ToolCall, ...] = ()


def parsed(
    text: str,
    form: CallFormat,
    tools: Sequence[ToolDefinition],
    *,
    key: bytes,
    opened_by: str = "",
    openings: tuple[str, ...] = OPENINGS,
) -> ParsedAnswer:
    """Parse the tool calls in an answer's text.

    `opened_by` is the marker with which the prompt opens thinking, or ""; `openings` are all markers with which the
    model may open it. A call's id depends only on `key` and on the call's position in the answer.
    """
    schemas = {tool.function.name: tool.function.parameters or {} for tool in tools}
    start = end_of_thinking(text, 0, opened_by) if opened_by else 0
    if start is None:
        return ParsedAnswer(text)
    calls, kept = (_filling if form.fills_answer else _scattered)(text, start, form, schemas, openings)
    numbered = (
        ToolCall(id=hashlib.blake2b(key + place.to_bytes(4), digest_size=5).hexdigest()[:_ID_LENGTH], function=call)
        for place, call in enumerate(calls)
    )
    return ParsedAnswer(kept.strip() if calls else text, tuple(numbered))


def num_unparsed(text: str) -> int:
    """Return the number of openings of calls, in any format, in the text that is left of a parsed answer."""
    return len(_ANY_OPENING.findall(split(text)[1]))


def _scattered(
    text: str, at: int, form: CallFormat, schemas: Schemas, openings: tuple[str, ...]
) -> tuple[list[FunctionCall], str]:
    """Return the calls from `at` on, and the text without them."""
    calls, kept, done, failures = list[FunctionCall](), list[str](), 0, 0
    begins = re.compile(f"{markers(openings)}|{form.opening}")
    while failures < _MOST_FAILURES and (match := begins.search(text, at)) is not None:
        at = match.end()
        if (opening := match["opening"]) is not None:
            end = end_of_thinking(text, at, opening)
            if end is None:
                break
            at = end
        elif match["closing"] is not None:
            calls, kept, done = [], [], 0
        else:
            try:
                found, end = _read(text, match, form, schemas)
            except CutOff:
                break  # what looks like a call in the rest is part of an argument
            except ValueError:
                failures += 1
                continue
            calls += found
            kept.append(text[done : match.start()])
            at = done = end
    return calls, "".join([*kept, text[done:]])


def _filling(
    text: str, at: int, form: CallFormat, schemas: Schemas, openings: tuple[str, ...]
) -> tuple[list[FunctionCall], str]:
    """Return the calls of which the text consists from `at`, or from the end of some thinking, to its end."""
    thinking, opening, failures = re.compile(markers(openings)), re.compile(form.opening), 0
    while failures < _MOST_FAILURES:
        failures += 1
        match = opening.match(text, at)
        if match is not None:
            try:
                calls, end = _read(text, match, form, schemas)
            except ValueError:
                calls, end = [], at
            if calls and not text[end:].strip():
                return calls, text[:at]
        marker = thinking.search(text, at)
        after = None if marker is None else marker.end()
        if marker is not None and marker["opening"] is not None:
            after = end_of_thinking(text, marker.end(), marker["opening"])
        if after is None:
            break
        at = after
    return [], text


def _read(text: str, match: re.Match[str], form: CallFormat, schemas: Schemas) -> tuple[list[FunctionCall], int]:
    calls, end = form.body(text, match, schemas)
    closing = form.end.match(text, end)
    if closing is None:
        raise ValueError("the call is not closed")
    return calls, closing.end()


# --- bodies -----------------------------------------------------------------------------------------------------------


def _json_calls(text: str, match: re.Match[str], schemas: Schemas) -> tuple[list[FunctionCall], int]:
    """Read objects that name a function and its arguments: a list of them, or one after another."""
    value, end = json_value(text, _end_of(_SPACE, text, match.end()))
    if isinstance(value, list):
        return [_call_of(each) for each in value], end
    calls = [_call_of(value)]
    while text.startswith("{", start := _end_of(_SEPARATOR, text, end)):
        value, end = json_value(text, start)
        calls.append(_call_of(value))
    return calls, end


_SPACE: Final = re.compile(r"\s*")
_SEPARATOR: Final = re.compile(r"[\s;,]*")


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return at if match is None else match.end()


def _call_of(value: Any) -> FunctionCall:
    if not isinstance(value, dict):
        raise ValueError("not an object")
    name = next((value[each] for each in _NAMES if each in value), None)
    arguments = next((value[each] for each in _ARGUMENTS if each in value), None)
    if isinstance(arguments, str):  # an object that was encoded twice
        arguments = json_value(arguments.strip() or "{}", 0)[0]
    return _call(name, arguments)


def _call(name: Any, arguments: Any) -> FunctionCall:
    if not (isinstance(name, str) and name.strip() and isinstance(arguments, dict)):
        raise ValueError("no name, or no arguments")
    name.encode()  # raises ValueError for half a character, which JSON can spell but no text can hold
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    if not written.isascii() and any("\ud800" <= char <= "\udfff" for char in written):
        written = json.dumps(arguments)
    return FunctionCall(name=name.strip(), arguments=written)


def _json_arguments(text: str, match: re.Match[str], schemas: Schemas) -> tuple[list[FunctionCall], int]:
    """Read an object of arguments; the opening names the function. A closing tag right after it means no arguments."""
    start = _end_of(_SPACE, text, match.end())
    if text.startswith(("<", "`"), start):
        return [_call(match["name"], {})], start
    arguments, end = json_value(text, start)
    return [_call(match["name"], arguments)], end


def _python_list(closing: str) -> Body:
    """Return a reader of a list of calls in Python's notation up to `closing`, which strings may contain."""

    def read(text: str, match: re.Match[str], schemas: Schemas) -> tuple[list[FunctionCall], int]:
        end = match.end()
        for _ in range(_MOST_FAILURES):
            end = text.index(closing, end)
            try:
                calls = python_calls(text[match.end() : end])
            except ValueError:
                end += 1
                continue
            return [_call(name, arguments) for name, arguments in calls], end
        raise ValueError("no list of calls")

    return read


def _braced_arguments(quote: str) -> Body:
    """Return a reader of arguments in Gemma's notation, whose strings stand between two `quote`."""

    def read(text: str, match: re.Match[str], schemas: Schemas) -> tuple[list[FunctionCall], int]:
        arguments, end = braced(text, match.end(), quote)
        return [_call(match["name"], arguments)], end

    return read


def _tagged(parameter: str, value_end: str, call_end: str, *, newlines: bool = False) -> Body:
    """Return a reader of parameters that stand each between tags of their own.

    `parameter` is the expression that opens a parameter, with the group `key`, and perhaps `is_string`, which says
    whether the value is a string; otherwise the tool's schema decides. A value ends at the first `value_end` that
    another parameter or `call_end` follows, so it may contain that tag. With `newlines`, a line break at either end of
    a value belongs to the format.
    """
    opening = re.compile(rf"\s*{parameter}")
    unnamed = re.sub(r"\?P<\w+>", "?:", parameter)
    value = re.compile(rf"(.*?){value_end}(?=\s*(?:{unnamed}|{call_end}))", re.DOTALL)

    def read(text: str, match: re.Match[str], schemas: Schemas) -> tuple[list[FunctionCall], int]:
        arguments, at, schema = dict[str, Any](), match.end(), schemas.get(match["name"].strip(), {})
        properties = schema.get("properties")
        while (begun := opening.match(text, at)) is not None:
            held = value.match(text, begun.end())
            if held is None:
                raise CutOff("a parameter is not closed")
            groups, written = begun.groupdict(), held[1]
            if newlines:
                written = written.removeprefix("\n").removesuffix("\n")
            known = properties.get(groups["key"]) if isinstance(properties, Mapping) else None
            if is_string := groups.get("is_string"):
                known = {"type": "string"} if is_string == "true" else None
            arguments[groups["key"]] = typed(written, known, schema)
            at = held.end()
        return [_call(match["name"], arguments)], at

    return read


# --- the table --------------------------------------------------------------------------------------------------------

_FUNCTION: Final = r"<function=(?P<name>[^>\n]+)>"
_INVOKE: Final = r'<{0}invoke name="(?P<name>[^"\n]+)">'
_XML_END: Final = r"</function>\s*(?:</{0}tool_call>|(?=<function=|<{0}tool_call>)|\Z)"
_INVOKE_END: Final = r"</{0}invoke>\s*(?:</{1}>|(?=<{0}invoke )|\Z)"
_PARAMETER: Final = r"<parameter=(?P<key>[^>\n]+)>"
_DSML: Final = "｜DSML｜"
_CHANNEL: Final = r"<\|channel\|>\w+"


def _xml(name: str, prefix: str, *, newlines: bool) -> CallFormat:
    end = _XML_END.format(prefix)
    body = _tagged(_PARAMETER, "</parameter>", end, newlines=newlines)
    return CallFormat(name, rf"(?:<{prefix}tool_call>\s*)?{_FUNCTION}", body, end)


def _invoked(name: str, prefix: str, section: str, attributes: str = "") -> CallFormat:
    end = _INVOKE_END.format(prefix, section)
    body = _tagged(rf'<{prefix}parameter name="(?P<key>[^"\n]+)"{attributes}>', f"</{prefix}parameter>", end)
    return CallFormat(name, rf"(?:<{section}>\s*)?{_INVOKE.format(prefix)}", body, end)


#: The formats that are parsed. Where a template's calls parse in several, the first is meant.
FORMATS: Final = (
    # Qwen2.5, Qwen3, Hermes, SmolLM3, Granite 4
    CallFormat("Hermes", "<tool_call>", _json_calls, r"</tool_call>|(?=<tool_call>)|\Z"),
    # Qwen3-Coder, Qwen3.5, Nemotron 3; the models sometimes omit <tool_call>
    _xml("Qwen3-Coder", "", newlines=True),
    CallFormat(
        "GLM",
        r"<tool_call>\s*(?P<name>[^\s<{]+)",
        _tagged(r"<arg_key>(?P<key>[^<\n]+)</arg_key>\s*<arg_value>", "</arg_value>", "</tool_call>"),
        "</tool_call>",
    ),
    _xml("Seed-OSS", "seed:", newlines=False),
    _invoked("MiniMax", "", "minimax:tool_call"),
    _invoked("DeepSeek V3.2", _DSML, rf"{_DSML}(?:function|tool)_calls", ' string="(?P<is_string>true|false)"'),
    CallFormat(
        "DeepSeek V3",
        r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\s<]+)\n```json\n",
        _json_arguments,
        r"```<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
    ),
    CallFormat(
        "DeepSeek V3.1",
        r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?P<name>[^\s<]+)<｜tool▁sep｜>",
        _json_arguments,
        r"<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
    ),
    CallFormat("Mistral", r"\[TOOL_CALLS\]\s*(?=\[)", _json_calls),
    CallFormat(
        "Mistral 3", r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)(?:\[CALL_ID\][^\s\[]*)?(?:\[ARGS\]|(?=\{))", _json_arguments
    ),
    CallFormat(
        "Kimi K2",
        r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?\s*"
        r"<\|tool_call_argument_begin\|>",
        _json_arguments,
        r"<\|tool_call_end\|>(?:\s*<\|tool_calls_section_end\|>)?",
    ),
    CallFormat(
        "gpt-oss",
        rf"(?:\A|<\|start\|>assistant|(?={_CHANNEL}))(?:{_CHANNEL})? ?to=functions\.(?P<name>[\w.-]+)"
        rf"(?: ?{_CHANNEL})?(?: ?(?:<\|constrain\|>)?\w+)?<\|message\|>",
        _json_arguments,
        r"<\|(?:call|end)\|>|(?=<\|start\|>)|\Z",
    ),
    CallFormat(
        "Gemma 4",
        r"<\|tool_call>\s*call:(?P<name>[^\s{]+)(?=\{)",
        _braced_arguments('<|"|>'),
        r"<tool_call\|>",
    ),
    CallFormat(
        "FunctionGemma",
        r"<start_function_call>\s*call:(?P<name>[^\s{]+)(?=\{)",
        _braced_arguments("<escape>"),
        "<end_function_call>",
    ),
    CallFormat("Phi and Granite 3", r"<\|tool_call\|>\s*(?=[\[{])", _json_calls, r"<\|/tool_call\|>|\Z"),
    CallFormat("Cohere", r"<\|START_ACTION\|>", _json_calls, r"<\|END_ACTION\|>|\Z"),
    CallFormat("Nemotron", "<TOOLCALL>", _json_calls, "</TOOLCALL>"),
    CallFormat("LFM2 in JSON", r"<\|tool_call_start\|>\s*(?=\[\s*\{)", _json_calls, r"<\|tool_call_end\|>|\Z"),
    CallFormat(
        "LFM2", r"<\|tool_call_start\|>\s*(?=\[)", _python_list("<|tool_call_end|>"), r"<\|tool_call_end\|>"
    ),
    CallFormat(
        "Llama 3", r"\s*(?:<\|python_(?:tag|start)\|>\s*)?(?=\{)", _json_calls, r"(?:<\|python_end\|>)?",
        fills_answer=True,
    ),
)  # fmt: skip

#: Matches what only a call begins with, in any format.
_ANY_OPENING: Final = re.compile(
    r"<(?:seed:|minimax:)?tool_call>(?:\s*(?:<function=|<invoke ))?|<function=|<(?:｜DSML｜)?invoke "
    r"|<｜tool▁call▁begin｜>|<\|tool_call(?:_begin|_start)?\|?>|\[TOOL_CALLS\]|<TOOLCALL>"
    r"|(?:\A|assistant|commentary) ?to=functions\.|<start_function_call>|<\|START_ACTION\|>"
    r'|<\|python_(?:tag|start)\|>|\A\s*\{\s*"name"\s*:'
)
