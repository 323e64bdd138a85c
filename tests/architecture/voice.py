"""Count phrasings that make the project's language hard to read.

    python -m tests.architecture.voice            counts
    python -m tests.architecture.voice --list     each place, as path:line and text

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
from pathlib import Path
from typing import Final

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


def docstrings(path: Path) -> Iterator[Place]:
    """Yield each docstring with the line of its definition."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield str(path.relative_to(ROOT)), getattr(node, "lineno", 1), text


def comments(path: Path) -> Iterator[Place]:
    """Yield each comment."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield str(path.relative_to(ROOT)), token.start[0], token.string


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


def main(arguments: Sequence[str]) -> None:
    """Print the counts, or each place with `--list`."""
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
