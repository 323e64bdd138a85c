"""`CallStyle`: how a chat template writes tool calls, found by rendering a call and parsing it back.

A template's source does not show its format: several formats share `<tool_call>`, and a template may describe one
format to the model and write another. Templates also differ in what they take. Most take a call's arguments as an
object; some (DeepSeek V3) append them to a text, and fail on anything else. Kimi K2's shows a function's name only as
part of the call's id.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from inference_contract.tools import ToolDefinition
from pipelinerl.answers.thinking import closing_of, opened_by
from pipelinerl.answers.tool_calls import FORMATS, CallFormat, parsed
from pipelinerl.errors import ModelError
from pipelinerl.models.control_tokens import Chat, Render, Turn

_NAME: Final = "probe_tool"
_TYPES: Final = {"text": "string", "count": "integer", "nested": "object"}
_TOOL: Final = ToolDefinition.model_validate(
    {
        "type": "function",
        "function": {
            "name": _NAME,
            "description": "Probe.",
            "parameters": {
                "type": "object",
                "properties": {name: {"type": kind, "description": name} for name, kind in _TYPES.items()},
                "required": [*_TYPES],
            },
        },
    }
)
#: Arguments that a format carries unchanged. A template that does not escape texts is tried with a plain text too.
_ARGUMENTS: Final = {"text": 'a "b"\n<c> \\ é', "count": 7, "nested": {"on": [True, None]}}
#: A call's id that Mistral's templates accept.
_ID: Final = "callprobe"
_QUESTION: Final[Turn] = {"role": "user", "content": "a"}


@dataclass(frozen=True)
class CallStyle:
    """The format of a template's calls, and the form in which the template takes a conversation's calls.

    `arguments_are_text` is True for templates that take arguments as JSON text. `ids_name_functions` is True for
    templates that show a function's name only in the call's id, `functions.{name}:{number of the call}`.
    """

    form: CallFormat
    arguments_are_text: bool = False
    ids_name_functions: bool = False

    def turns(self, turns: Sequence[Turn]) -> list[Turn]:
        """Return the messages in the form that the template takes, with its ids of calls and results."""
        ids: dict[str, str] = {}
        shown = []
        for turn in turns:
            if calls := turn.get("tool_calls"):
                turn = {**turn, "tool_calls": [self._call(call, ids) for call in calls]}
            elif (known := ids.get(turn.get("tool_call_id", ""))) is not None:
                turn = {**turn, "tool_call_id": known}
            shown.append(turn)
        return shown

    def _call(self, call: Mapping[str, Any], ids: dict[str, str]) -> dict[str, Any]:
        function = call["function"]
        if self.ids_name_functions:
            ids[call["id"]] = f"functions.{function['name']}:{len(ids)}"
        if self.arguments_are_text and not isinstance(function["arguments"], str):
            function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
        return {**call, "id": ids.get(call["id"], call["id"]), "function": function}


def find_style(render: Render, ends: Collection[str]) -> CallStyle | None:
    """Return how a template writes calls, None if none parse back; `ends` spell the tokens that end a sample."""
    for arguments in (_ARGUMENTS, _ARGUMENTS | {"text": "a"}):
        for ids_name_functions, arguments_are_text in itertools.product((False, True), repeat=2):
            style = CallStyle(FORMATS[0], arguments_are_text, ids_name_functions)
            answer = _written(style, _NAME, arguments, render, ends)
            if answer is None:
                continue
            text, opening = answer
            for form in FORMATS:
                calls = [each.function for each in parsed(text, form, [_TOOL], key=b"", opened_by=opening).calls]
                if [(each.name, json.loads(each.arguments)) for each in calls] == [(_NAME, arguments)]:
                    return replace(style, form=form)
    return None


def written_call(
    style: CallStyle, name: str, arguments: Mapping[str, Any], render: Render, ends: Collection[str]
) -> str:
    """Return a call as the model writes it after its prompt, thinking ended. Raises ModelError if it cannot render."""
    answer = _written(style, name, arguments, render, ends)
    if answer is None:
        raise ModelError(f"the chat template cannot render a call of {name}; correct the template")
    return answer[0]


def _written(
    style: CallStyle, name: str, arguments: Mapping[str, Any], render: Render, ends: Collection[str]
) -> tuple[str, str] | None:
    """Return the answer of one call, and the marker by which the prompt opens thinking; None if it is not rendered."""
    call = {"id": _ID, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}
    answer: Turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    tools = [_TOOL.for_template()]
    try:
        prompt = render(Chat(turns=[_QUESTION], tools=tools), True)
        whole = render(Chat(turns=style.turns([_QUESTION, answer]), tools=tools), False)
    except ModelError:
        return None
    opening, same = opened_by(prompt), zip(prompt, whole, strict=False)
    shared = next((at for at, (one, other) in enumerate(same) if one != other), min(len(prompt), len(whole)))
    text = whole[shared:]
    if shared < len(prompt):  # the template shows an earlier answer without the opening of its thinking
        tag = max(whole.rfind(bracket, 0, shared) for bracket in "<[")
        if tag >= 0 and not {">", "]"}.intersection(whole[tag:shared]):
            text = whole[tag:]  # the two differ within a tag
        if opening and not text.lstrip().startswith(closing_of(opening)):
            text = f"{closing_of(opening)}\n\n{text}"
    at = min((found for found in (text.find(end) for end in ends) if found >= 0), default=len(text))
    return text[:at], opening
