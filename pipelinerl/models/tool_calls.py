"""Parser of tool calls in an answer's text, in the format that the model's chat template writes.

    Hermes      <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>         Qwen2.5, Qwen3, SmolLM3, Hermes
    Qwen3 XML   <tool_call><function=f><parameter=a>1</parameter></function></tool_call>          Qwen3-Coder
    Llama JSON  {"name": "f", "parameters": {"a": 1}}, alone or after <|python_tag|>              Llama 3.1 to 3.3

Calls that cannot be parsed stay in the text, where the agent can see them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from inference_contract.tools import FunctionCall, ToolCall, ToolDefinition

_CALL: Final = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION: Final = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*\Z", re.DOTALL)
_PARAMETER: Final = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_PYTHON_TAG: Final = "<|python_tag|>"
#: Length of a tool call's id; Mistral's templates accept only ids of nine letters and digits.
_ID_LENGTH: Final = 9


class CallFormat(StrEnum):
    """Formats in which models write tool calls."""

    HERMES = "hermes"
    QWEN3_XML = "qwen3_xml"
    LLAMA_JSON = "llama_json"


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An answer's tool calls, and its text outside these calls."""

    content: str
    calls: tuple[ToolCall, ...] = ()


def format_of(template: str) -> CallFormat | None:
    """Return the format in which a template writes tool calls; None if it writes none or the format is unknown."""
    if "<function=" in template:
        return CallFormat.QWEN3_XML
    if "<tool_call>" in template:
        return CallFormat.HERMES
    return CallFormat.LLAMA_JSON if '"parameters": ' in template and "tool_calls" in template else None


def parsed(text: str, form: CallFormat, tools: Sequence[ToolDefinition], *, key: bytes) -> ParsedAnswer:
    """Parse the tool calls in an answer's text. A call's id depends only on `key` and its position in the answer."""
    if form is CallFormat.LLAMA_JSON:
        found = list(_llama_calls(text))
        return ParsedAnswer("" if found else text, _with_ids(found, key))
    read = _hermes_call if form is CallFormat.HERMES else _xml_reader(tools)
    found, kept, end = [], [], 0
    for match in _CALL.finditer(text):
        call = read(match[1])
        if call is not None:
            found.append(call)
            kept.append(text[end : match.start()])
            end = match.end()
    content = "".join([*kept, text[end:]])
    return ParsedAnswer(content.strip() if found else content, _with_ids(found, key))


def written(form: CallFormat, name: str, arguments: Mapping[str, str]) -> str:
    """Return a tool call as a model writes it in this format."""
    if form is CallFormat.QWEN3_XML:
        parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"
    key = "parameters" if form is CallFormat.LLAMA_JSON else "arguments"
    call = json.dumps({"name": name, key: arguments}, ensure_ascii=False)
    return call if form is CallFormat.LLAMA_JSON else f"<tool_call>\n{call}\n</tool_call>"


def _with_ids(calls: Sequence[FunctionCall], key: bytes) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(id=hashlib.blake2b(key + bytes([place % 256]), digest_size=5).hexdigest()[:_ID_LENGTH], function=call)
        for place, call in enumerate(calls)
    )


def _hermes_call(text: str) -> FunctionCall | None:
    return _call_of(_json(text), "arguments")


def _llama_calls(text: str) -> Iterator[FunctionCall]:
    """Yield the Llama calls in a text that consists only of calls; yield none for any other text."""
    rest, calls, decoder = text.strip().removeprefix(_PYTHON_TAG).strip(), list[FunctionCall](), json.JSONDecoder()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except ValueError:
            return
        call = _call_of(value, "parameters") or _call_of(value, "arguments")
        if call is None:
            return
        calls.append(call)
        rest = rest[end:].lstrip(" \n;,")
    yield from calls


def _xml_reader(tools: Sequence[ToolDefinition]) -> Callable[[str], FunctionCall | None]:
    schemas = {tool.function.name: (tool.function.parameters or {}).get("properties", {}) for tool in tools}

    def read(text: str) -> FunctionCall | None:
        match = _FUNCTION.match(text)
        if match is None:
            return None
        known = schemas.get(match[1], {})
        arguments = {name: _typed(value, known.get(name)) for name, value in _PARAMETER.findall(match[2])}
        return FunctionCall(name=match[1], arguments=json.dumps(arguments, ensure_ascii=False))

    return read


def _typed(value: str, schema: Any) -> Any:
    """Parse `value` as JSON; return it unchanged if the schema requires a string or `value` is not valid JSON."""
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return value
    plain = _json(value)
    return value if plain is None else plain


def _call_of(value: Any, arguments: str) -> FunctionCall | None:
    if (
        not isinstance(value, dict)
        or not isinstance(value.get("name"), str)
        or not isinstance(value.get(arguments), dict)
    ):
        return None
    return FunctionCall(name=value["name"], arguments=json.dumps(value[arguments], ensure_ascii=False))


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
