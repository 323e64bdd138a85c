r"""Extraction of the final answer from a model's text, and of the reference answer from a ground truth.

The last statement counts: a `\boxed{…}` or `<answer>…</answer>`, else a last line `#### …` (GSM8K), else the text after
"answer is" or "Answer:", else the only value in the last sentence. Thoughts up to `</think>` do not count, and neither
does a box that is never closed. Boxes that only "and", "or" or a comma separates are one answer of several values.

All functions take time linear in the text's length.
"""

from __future__ import annotations

import re
from typing import Final

from pipelinerl.plugins.math_answer.notation import canonical
from pipelinerl.plugins.math_answer.quantities import quantity
from pipelinerl.verifiers.verifier import last_tagged

#: Longest content of a box, in characters.
MOST_CHARS: Final = 4000
#: Number of adjacent boxes that are read as one answer.
_MOST_BOXES: Final = 32
#: Number of occurrences of "answer", from the end, of which one must state the answer.
_MOST_STATED: Final = 50

_BOX: Final = re.compile(r"\\(?:boxed|fbox|framebox)\s{0,4}(?:\{|(?=[A-Za-z0-9]))")
_BRACE: Final = re.compile(r"\\.|[{}]", re.DOTALL)
_BETWEEN_BOXES: Final = re.compile(
    r"[\s$*.()\[\]\\]{0,20}(?:[,;]|[,;]?\s{0,4}(?:\\text\{\s{0,4})?(?:and|or)\b\s{0,4}\}?)[\s$*()\[\]\\]{0,20}"
)
_HASHES: Final = re.compile(r"####\s{0,4}(\S.{0,4000})")
_ANSWER: Final = re.compile(r"answers?\b", re.IGNORECASE)
#: Text between the word "answer" and what it is.
_STATES: Final = re.compile(
    r"(?:\s(?!is\b|are\b|=|:)[^\n.:=]{0,80}?)?[\s*_]{0,8}(?:\bis\b|\bare\b|[:=]|\n)[\s*_:]*+"
    r"(?:(?:the\s)?(?:final\s)?answer\sis[\s*_:]*+)?"
)
_DISPLAY: Final = re.compile(r"\$\$(.{0,4000}?)\$\$|\\\[(.{0,4000}?)\\\]", re.DOTALL)
_INLINE: Final = re.compile(r"\$((?:[^$\n\\]|\\.){1,2000})\$|\\\(((?:[^\\\n]|\\(?!\))){1,2000})\\\)")
_END_OF_CLAUSE: Final = re.compile(
    r"(?<![ap]\.m)[.?](?=\s+[A-Z$*\\(])|,?\s(?:because|since|which|where|as)\s|,\s(?:so|but|not|and\sso)\s", re.DOTALL
)
_SENTENCE: Final = re.compile(r"(?<=[.!?])\s+(?=[A-Z$*\\(])")
_VALUE: Final = re.compile(
    r"\d{1,2}:\d\d(?:\s?[AaPp]\.?[Mm]\.?)?|[$€£]?[-+−]?\d[\d,]*(?:\.\d+)?(?:\s?/\s?\d+|\s?(?:%|\\%|percent))?"
)
_LAST_INLINE: Final = re.compile(r"(?:\b(?:is|are|equals|get|gives|so)|=)[\s:]{1,3}$")
_LEAD: Final = re.compile(r"(?:therefore|thus|then|simply|just|exactly|equal to|given by)\b[,:]?\s*", re.IGNORECASE)
#: Words of a sentence that keep its only number from being an answer.
_HEDGES: Final = re.compile(
    r"\b(?:not|no|never|cannot|can't|isn't|wrong|or|either|about|around|nearly|approximately|between|less|fewer|more|"
    r"most|least|than|except|maybe|perhaps|step|guess)\b",
    re.IGNORECASE,
)
#: Largest number of words of a text without marks that is an answer as a whole.
_MOST_WORDS: Final = 6


def final_answer(text: str) -> str:
    """Return the final answer in a model's text, as written there; "" if there is none."""
    end, begin = text.rfind("</think>"), text.rfind("<think>")
    if begin > end:
        return _final(text[:begin])
    return _final(text if end < 0 else text[end + len("</think>") :])


def reference_answer(ground_truth: str) -> str:
    r"""Return the answer in a ground truth: its last box, else its last line if it is `#### …`, else all of it."""
    box = _last_boxes(ground_truth)
    if box is not None:
        return box[1]
    line = _last_line(ground_truth)
    hashes = _HASHES.fullmatch(line)
    return hashes[1].strip() if hashes else ground_truth.strip()


def _final(text: str) -> str:
    box, tag = _last_boxes(text), text.rfind("</answer>")
    tagged = last_tagged(text)
    if tagged is not None and (box is None or box[0] < tag):
        marked = "\\boxed" in tagged or _stated(tagged) is not None
        return _final(tagged) if marked else tagged.strip()
    if box is not None:
        return box[1]
    hashes = _HASHES.fullmatch(_last_line(text))
    if hashes:
        return _plain(hashes[1])
    stated = _stated(text)
    return _last_value(text) if stated is None else stated


def _last_boxes(text: str) -> tuple[int, str] | None:
    """Return position and content of the last box, with boxes that belong to it; the content is "" if it is open."""
    contents: list[str] = []
    last = len(text)
    position = following = -1
    while len(contents) < _MOST_BOXES:
        last = max(text.rfind(name, 0, last) for name in ("\\boxed", "\\fbox", "\\framebox"))
        match = _BOX.match(text, last) if last >= 0 else None
        if match is None:
            break
        content, end = _content(text, match)
        if contents and not _BETWEEN_BOXES.fullmatch(text, end, following):
            break
        position, following = max(position, last), last
        if content is None:
            return position, "" if not contents else ", ".join(contents)
        contents.insert(0, content)
        if not content.strip():
            break
    if position < 0:
        return None
    return position, ", ".join(contents)


def _content(text: str, box: re.Match[str]) -> tuple[str | None, int]:
    """Return the content of a box, None if it is not closed, and the position after it."""
    begin = box.end()
    if not box[0].endswith("{"):
        return text[begin], begin + 1
    depth = 1
    for brace in _BRACE.finditer(text, begin, begin + MOST_CHARS):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[begin : brace.start()], brace.end()
    return None, len(text)


def _last_line(text: str) -> str:
    return text.rstrip()[-2 * MOST_CHARS :].rpartition("\n")[2].strip()


def _stated(text: str) -> str | None:
    """Return what the text last states to be the answer, None if it states none."""
    words = [match.end() for match in _ANSWER.finditer(text)]
    for position in reversed(words[-_MOST_STATED:]):
        states = _STATES.match(text, position)
        if states is None:
            continue
        rest = text[states.end() : states.end() + 2 * MOST_CHARS]
        display = _DISPLAY.match(rest)
        return (display[1] or display[2] or "").strip() if display else _plain(rest.partition("\n")[0])
    return None


def _plain(line: str) -> str:
    """Return the value that a line begins with, without emphasis, later clauses and a final full stop."""
    line = re.sub(r"\*\*|__", "", line).strip().strip("*").strip()
    line = _LEAD.sub("", line, count=1) if _LEAD.match(line) else line
    return _END_OF_CLAUSE.split(line, maxsplit=1)[0].strip().rstrip(".,;:").strip()


def _last_value(text: str) -> str:
    """Return the value that an unmarked text ends with, "" if its last sentence has none or several, or doubts it."""
    text = text.rstrip()[-MOST_CHARS:]
    display = list(_DISPLAY.finditer(text))
    if display and display[-1].end() >= len(text) - 1:
        return (display[-1][1] or display[-1][2] or "").strip()
    line = re.sub(r"\*\*|__", "", _last_line(text)).strip()
    line = _SENTENCE.split(line)[-1].strip().rstrip(".").strip()
    if not re.search(r"[A-Za-z]{2,}", re.sub(r"\\[A-Za-z]+", "", line)) or quantity(canonical(line)) is not None:
        return line
    if _HEDGES.search(line):
        return "" if len(line.split()) > _MOST_WORDS else line
    inline = list(_INLINE.finditer(line))
    if inline:
        last = inline[-1]
        concludes = not line[last.end() :].strip(" .") and _LAST_INLINE.search(line[: last.start()])
        return (last[1] or last[2]) if len(inline) == 1 or concludes else ""
    values = _VALUE.findall(line.rpartition("=")[2])
    if values:
        return values[0] if len(values) == 1 else ""
    return line if len(line.split()) <= _MOST_WORDS else ""
