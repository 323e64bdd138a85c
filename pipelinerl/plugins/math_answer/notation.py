r"""Normal forms of an answer's notation: LaTeX without layout, and the same as plain text.

`canonical` keeps everything that carries meaning, such as `\text{…}`, spaces between digits and the space of a list
`1, 234`. `normal_form` is for comparing answers as text and for showing them. Both take time linear in the text.
"""

from __future__ import annotations

import re
from typing import Final

_SIGNS: Final = str.maketrans({
    "−": "-", "–": "-", "‐": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": "/",
    "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm ",
    "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "∈": r"\in ", "ℝ": r"\mathbb{R}", "°": r"^\circ ", "²": "^2",
    "³": "^3", "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u200b": "", "⁄": "/", "％": "%",
    "θ": r"\theta ", "∠": r"\angle ",
})  # fmt: skip

#: Commands with the same meaning as another one, or with none, by their name.
_SYNONYMS: Final = {
    "dfrac": r"\frac", "tfrac": r"\frac", "cfrac": r"\frac", "geq": r"\ge", "geqslant": r"\ge", "leq": r"\le",
    "leqslant": r"\le", "neq": r"\ne", "varnothing": r"\emptyset", "lbrace": r"\{", "rbrace": r"\}", "lvert": "|",
    "rvert": "|", "vert": "|", "mid": "|", "lbrack": "[", "rbrack": "]", "colon": ":", "degree": r"^\circ",
    "quad": " ", "qquad": " ", "thinspace": " ", "infin": r"\infty", "dollar": r"\$", "displaystyle": "",
    "textstyle": "", "limits": "", "left": "", "right": "", "big": "", "Big": "", "bigg": "", "Bigg": "", "bigl": "",
    "bigr": "", "Bigl": "", "Bigr": "", "ast": r"\cdot ", "bmod": r"\mod", "to": r"\rightarrow", "arcsin": r"\arcsin",
    "lt": "<", "gt": ">", "langle": "(", "rangle": ")",
    "rm": "", "boldsymbol": "", "mathbf": "", "bf": "", "bold": "", "mathit": "", "it": "",
}  # fmt: skip
_COMMAND: Final = re.compile(r"\\([A-Za-z]+)(?: (?![A-Za-z0-9]))?")
_TEXT: Final = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|texttt|mathrm|mathsf|mbox|operatorname)\s?\{([^{}]*)\}"
)
_KEPT_TEXT: Final = re.compile(r"\\text\{([^{}]*)\}")
#: A space that separates nothing; the others stand between two words or numbers, or before a word.
_NEEDLESS_SPACE: Final = re.compile(r" (?![A-Za-z0-9.\\])|(?<![A-Za-z0-9.%}])(?<!\d,) | (?=\\(?!text))")
_PLAIN_ROOT: Final = re.compile(r"(?<![A-Za-z\\])sqrt\s?\(([^()]*)\)|√\s?(?:\(([^()]*)\)|(\d+|[a-z]))")
_PLAIN_WORDS: Final = {"pi": r"\pi ", "infinity": r"\infty ", "inf": r"\infty ", "oo": r"\infty ", "sqrt": r"\sqrt"}
_PLAIN_WORD: Final = re.compile(rf"(?<![A-Za-z\\])(?:{'|'.join(_PLAIN_WORDS)})(?![A-Za-z])")
_NUMBER: Final = re.compile(r"([-+]?)(\d+)((?:\.\d+)?)")
_ALL_OF_NUMBER: Final = re.compile(r"[-+]?[\d,]+(?:\.\d+)?")
#: A matrix written as an array, with its brackets.
_ARRAY: Final = re.compile(r"[(\[]? ?\\begin\{array\}\{[^{}]*\}(.*?)\\end\{array\} ?[)\]]?", re.DOTALL)


def canonical(answer: str) -> str:
    r"""Return an answer as LaTeX in one spelling: without layout, `\left`, delimiters and a final full stop."""
    text = _without_delimiters(answer.translate(_SIGNS).strip().strip("*"))
    text = text.replace(r"\%", "%").replace("{,}", ",").replace("{:}", ":").replace("~", " ").replace("**", "^")
    text = re.sub(r"(\d)\\[,!](\d{3})(?!\d)", r"\1,\2", text)
    text = re.sub(r"\\!", "", re.sub(r"(?<!\\)\\[,;: ]|\s+", " ", text))
    text = _TEXT.sub(_text, _TEXT.sub(_text, text))
    text = _COMMAND.sub(lambda match: _SYNONYMS.get(match[1], match[0]), text)
    text = _ARRAY.sub(r"\\begin{pmatrix}\1\\end{pmatrix}", text)
    text = _PLAIN_ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2] or match[3]}}}", text)
    text = _PLAIN_WORD.sub(lambda match: _PLAIN_WORDS[match[0]], text).replace("*", r"\cdot ")
    text = re.sub(r"\\frac ?(\d) ?(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac ?(\d) ?\{", r"\\frac{\1}{", text)
    text = re.sub(r"(\\frac ?\{[^{}]*\}) ?(\d)", r"\1{\2}", text)
    text = re.sub(r"\\sqrt ?(\d)", r"\\sqrt{\1}", text)
    text = re.sub(r"\^ ?(-\d+)", r"^{\1}", text)
    text = re.sub(r"([_^]) ?\{([A-Za-z0-9]|\\circ)\}", r"\1\2", text)
    text = _NEEDLESS_SPACE.sub("", re.sub(r" +", " ", text)).strip()
    text = text if text.endswith("..") else text.rstrip(".,;: ")
    while len(text) > 1 and text[0] == "{" and text[-1] == "}" and _closes_at_end(text):
        text = text[1:-1].strip()
    return text


def normal_form(answer: str) -> str:
    r"""Return an answer as text to compare: `canonical` without `\text`, separators and needless zeros."""
    return plain(canonical(answer))


def plain(text: str) -> str:
    r"""Return a canonical answer without `\text`, thousands separators and needless zeros."""
    text = _KEPT_TEXT.sub(r" \1 ", text)
    text = _NEEDLESS_SPACE.sub("", re.sub(r" +", " ", text)).strip()
    if not text.endswith(".."):
        text = text.rstrip(".,;: ")
    if _ALL_OF_NUMBER.fullmatch(text):
        text = re.sub(r"(?<=\d),(?=\d{3}(?:\D|$))", "", text)
    number = _NUMBER.fullmatch(text)
    if number is None:
        return re.sub(r"(?<=\d), (?=\d)", ",", text)
    fraction = number[3].rstrip("0").rstrip(".")
    digits = f"{number[2].lstrip('0') or '0'}{fraction}"
    return f"-{digits}" if number[1] == "-" and digits != "0" else digits


def split_top(text: str, separator: re.Pattern[str]) -> list[str]:
    """Split at the matches of `separator` that are outside all brackets, braces and environments."""
    parts, begin, depth = [], 0, 0
    tokens = re.compile(rf"(?P<separator>{separator.pattern})|\\begin|\\end|\\[{{}}]|[][(){{}}]|\\.", re.DOTALL)
    for match in tokens.finditer(text):
        token = match[0]
        if match["separator"] is not None:
            if depth == 0:
                parts.append(text[begin : match.start()])
                begin = match.end()
        elif token in ("(", "[", "{", "\\{", "\\begin"):
            depth += 1
        elif token in (")", "]", "}", "\\}", "\\end"):
            depth -= 1
    parts.append(text[begin:])
    return [part.strip() for part in parts]


def _text(match: re.Match[str]) -> str:
    return rf" \text{{{' '.join(match[1].split())}}} " if match[1].strip() else " "


def _without_delimiters(text: str) -> str:
    r"""Remove `$`, `\(` and the like; a single `$`, or one with a backslash, is money and stays."""
    text = re.sub(r"\\[()\[\]]", " ", text) if not re.search(r"\\\\\[", text) else text
    text = text.replace("\\$", "\x00")
    if text.count("$") % 2 == 0 or not re.match(r"\s*[-+]?\$\s*[\d.]", text):
        text = text.replace("$", " ")
    return text.replace("\x00", "$").strip()


def _closes_at_end(text: str) -> bool:
    depth = 0
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.end() == len(text)
    return False
