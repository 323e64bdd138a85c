"""Separate an answer's thinking from the text that its reader sees.

Model families mark thinking differently, and some chat templates write the opening marker into the prompt. A closing
marker without an opening one therefore ends thinking that began with the answer.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Final

#: Closing marker of each opening one.
_CLOSING: Final = {
    "<think>": "</think>",  # DeepSeek, GLM, Kimi, MiniMax, Nemotron, Qwen
    "<seed:think>": "</seed:think>",  # Seed-OSS
    "[THINK]": "[/THINK]",  # Mistral
    "◁think▷": "◁/think▷",  # Kimi-VL
    "<thought>": "</thought>",  # EXAONE
    "<|START_THINKING|>": "<|END_THINKING|>",  # Cohere
    "<|inner_prefix|>": "<|inner_suffix|>",  # Apertus
    "<|channel>thought": "<channel|>",  # Gemma 4
    "<|channel|>analysis<|message|>": "<|end|>",  # gpt-oss
}
#: The marker that ends every message of gpt-oss and every turn of other families: alone, it ends no thinking.
_ENDS_MESSAGES: Final = "<|end|>"
#: Headers that gpt-oss writes before the text of an answer.
_HEADER: Final = re.compile(r"(?:<\|end\|>)?(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)<\|message\|>")
#: The opening markers of all families.
OPENINGS: Final = tuple(_CLOSING)


@cache
def markers(openings: tuple[str, ...]) -> str:
    """Return an expression for the markers of the families with these openings.

    The group `opening` is set for an opening marker, `closing` for a closing one.
    """
    closing = "|".join(re.escape(_CLOSING[each]) for each in openings if _CLOSING[each] != _ENDS_MESSAGES)
    return f"(?P<opening>{'|'.join(map(re.escape, openings))})|(?P<closing>{closing or '(?!)'})"


_MARKER: Final = re.compile(markers(OPENINGS))


def openings_in(template: str) -> tuple[str, ...]:
    """Return the opening markers that a chat template mentions, or whose closing it mentions; all if there are none."""
    return (
        tuple(
            each
            for each, closing in _CLOSING.items()
            if each in template or (closing in template and closing != _ENDS_MESSAGES)
        )
        or OPENINGS
    )


def end_of_thinking(text: str, start: int, opening: str) -> int | None:
    """Return the position after the marker that closes `opening`, searched from `start`; None if there is none."""
    closing = _CLOSING[opening]
    at = text.find(closing, start)
    return None if at < 0 else at + len(closing)


def opened_by(prompt: str) -> str:
    """Return the opening marker with which a prompt ends, so that the answer begins inside thinking; "" if none."""
    end = prompt[-64:].rstrip()
    return next((opening for opening in _CLOSING if end.endswith(opening)), "")


def closing_of(opening: str) -> str:
    """Return the marker that closes `opening`, one of the markers that `opened_by` returns."""
    return _CLOSING[opening]


def split(text: str) -> tuple[str, str]:
    """Return an answer's thinking and its other text, both without markers.

    Thinking that the answer does not close, because it was cut off, is thinking too.
    """
    thinking, shown, at = list[str](), list[str](), 0
    while (marker := _MARKER.search(text, at)) is not None:
        shown.append(text[at : marker.start()])
        at = marker.end()
        if marker["opening"] is None:  # the prompt or an earlier marker has opened this thinking
            thinking += shown
            shown = []
            continue
        end = end_of_thinking(text, at, marker["opening"])
        closed = len(text) if end is None else end - len(_CLOSING[marker["opening"]])
        thinking.append(text[at:closed])
        at = len(text) if end is None else end
    rest = "".join([*shown, text[at:]])
    if thinking or _HEADER.match(rest):
        rest = _HEADER.sub("", rest).lstrip()
    return "\n".join(part for part in map(str.strip, thinking) if part), rest
