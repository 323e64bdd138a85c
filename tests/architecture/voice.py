"""Count phrasings that make the project's language hard to read.

    python -m tests.architecture.voice            counts
    python -m tests.architecture.voice --list     each place, as path:line and text
    python -m tests.architecture.voice --draw 7   40 docstrings, comments and test names, drawn by this seed, for a
                                                  reader who has not seen them: 36 of each should be clear at once

Counted are product files, tests and benchmarks: docstrings whose first line is a clause ("What…", "Whether…", "Of…",
"So…") or a question instead of an imperative or a noun phrase; and words of the list `WORN` in docstrings, comments
and docs, for which the field has a plainer word. For README and docs, it counts the words per sentence.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from pipelinerl import rng

ROOT: Final = Path(__file__).parents[2]
CLAUSE: Final = re.compile(r"(What|Who|Whom|Whose|Which|Whether|When|Where|Why|How|Of|So|That|As|If)\b")
WORN: Final = re.compile(
    r"\b(beside|anew|nobody|whoever|so many|told|heard|goes on|go on|gone on|went on|by hand|on its own account)\b",
    re.I,
)
Place = tuple[str, int, str]


def sources(*folders: str) -> list[Path]:
    """Return the Python files below the given folders, sorted."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py") if ".venv" not in path.parts)


EVERYWHERE: Final = ("pipelinerl", "launch", "inference_contract", "trainer_contract", "tests", "benchmarks")


@cache
def docstrings(path: Path) -> tuple[Place, ...]:
    """Return each docstring with the line of its definition."""
    named = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, named))
    texts = ((getattr(node, "lineno", 1), ast.get_docstring(node)) for node in nodes)
    return tuple((str(path.relative_to(ROOT)), line, text) for line, text in texts if text)


@cache
def comments(path: Path) -> tuple[Place, ...]:
    """Return each comment."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    found = (token for token in tokens if token.type == tokenize.COMMENT)
    return tuple((str(path.relative_to(ROOT)), token.start[0], token.string) for token in found)


def prose() -> Iterator[Place]:
    """Yield each line of README and docs outside code blocks."""
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")]):
        code = False
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code ^= line.startswith("```")
            if not code:
                yield str(path.relative_to(ROOT)), number, line


def clauses() -> list[Place]:
    """Return docstrings that begin with a clause instead of an imperative or a noun phrase."""
    return [place for path in sources(*EVERYWHERE) for place in docstrings(path) if CLAUSE.match(place[2])]


def questions() -> list[Place]:
    """Return docstrings whose first line is a question."""
    found = (place for path in sources(*EVERYWHERE) for place in docstrings(path))
    return [place for place in found if place[2].splitlines()[0].rstrip().endswith("?")]


def worn_words() -> list[Place]:
    """Return uses of worn words in docstrings, comments and docs."""
    texts: list[Place] = [*prose()]
    for path in sources(*EVERYWHERE):
        texts += [*docstrings(path), *comments(path)]
    return [(path, line, match[0]) for path, line, text in texts for match in WORN.finditer(text)]


def words_per_sentence(path: Path) -> float:
    """Return the mean number of words in the sentences of a Markdown file; code, tables and headings do not count."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    text = re.sub(r"^(\||#|!|    ).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text)
    lengths = [len(sentence.split()) for sentence in re.split(r"(?<=[.!?:])\s+|\n\n|\n- ", text)]
    kept = [length for length in lengths if length > 2]
    return sum(kept) / max(1, len(kept))


def draw(seed: int, count: int = 40) -> Iterator[str]:
    """Yield `count` docstrings and comments of product files with their lines of code, and as many test names."""
    files = sources(*EVERYWHERE[:4], EVERYWHERE[-1])
    tests = [
        (str(path.relative_to(ROOT)), number, line)
        for path in sources("tests")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.match(r"\s*(async )?def test_", line)
    ]
    pools = {
        "docstring": [place for path in files for place in docstrings(path)],
        "comment": [place for path in files for place in comments(path)],
        "test name": tests,
    }
    for kind, places in pools.items():
        for index in rng.generator(seed, "voice", kind).permutation(len(places))[:count]:
            path, line, text = places[index]
            code = (ROOT / path).read_text().splitlines()[line - 1].strip()
            yield f"{kind}, {path}:{line}\n    {code}\n" + (f"    {text}\n" if kind == "docstring" else "")


def main(arguments: Sequence[str]) -> None:
    """Print the counts, each place with `--list`, or only a draw with `--draw`."""
    if "--draw" in arguments:
        print("\n".join(draw(int(arguments[arguments.index("--draw") + 1]))))
        return
    counted = {
        "docstrings that begin with a clause": clauses(),
        "docstrings that are questions": questions(),
        "worn words": worn_words(),
    }
    for name, places in counted.items():
        print(f"{len(places):5}  {name}")
        if "--list" in arguments:
            print("".join(f"       {path}:{line} {text.splitlines()[0][:90]}\n" for path, line, text in places), end="")
    print(f"{words_per_sentence(ROOT / 'README.md'):5.1f}  words in a sentence of README.md")
    docs = sorted((ROOT / "docs").rglob("*.md"))
    print(f"{sum(map(words_per_sentence, docs)) / len(docs):5.1f}  words in a sentence of docs/, mean over files")


if __name__ == "__main__":
    main(sys.argv[1:])
