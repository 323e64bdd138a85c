"""`DataRows`: the rows of a data set, each made when it is asked for. Of files: JSON lines, JSON arrays, CSV.

Promises that a file of a million rows is no million of Python objects: what is kept is the file's text and where each
row begins. `arrow_rows.py` has those that pyarrow reads.
"""

from __future__ import annotations

import bisect
import csv
import gzip
import io
import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, final

import numpy as np
import orjson

from pipelinerl.errors import RecipeError

Row = dict[str, Any]

_NEWLINE: Final = 10
#: What some editors begin a file with.
_MARK: Final = b"\xef\xbb\xbf"
#: Of a file whose lines are counted at a time; numpy marks each with a byte.
_CHUNK_BYTES: Final = 1 << 26


class FirstRows(NamedTuple):
    """How much of a file is looked at: so many rows, within so many bytes where they can be read alone."""

    rows: int
    bytes: int


class DataRows(Protocol):
    """Rows by number, from 0."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def row(self, index: int) -> Row:
        """One row, by field. Raises `RecipeError` for one that cannot be read."""
        ...

    def scan(self, fields: frozenset[str]) -> Iterator[Row]:
        """All rows in order, at least with these fields, as far as they have them. Raises as `row` does."""
        ...

    def place(self, index: int) -> str:
        """What a user would call the row: file and line, or file and number."""
        ...

    def unread(self, index: int) -> tuple[str, ...]:
        """The fields of the row that were left in its file because nothing asked for them."""
        ...


@final
class JsonRows:
    """One JSON object on each line; what comes from another format was brought into this form."""

    def __init__(self, text: bytes, name: str, *, numbered: str = "row", most: int | None = None) -> None:
        self._text = text
        self._name = name
        self._numbered = numbered
        self._starts, self._ends = (each[:most] for each in _lines(text))

    @classmethod
    def read(cls, path: Path, head: FirstRows | None = None) -> JsonRows:
        """Read a file of JSON lines, a JSON array or CSV; `.gz` behind the suffix is unpacked.

        Args:
            head: how much of it; of an array and of CSV, which have no lines, all is read and fewer rows are kept.

        Raises:
            RecipeError: the file cannot be read, or is not what its suffix says.
        """
        suffix, most = suffix_of(path), None if head is None else head.rows
        if suffix == ".csv":
            return cls.of(itertools.islice(_csv_rows(_unpacked(path), path), most), str(path))
        if suffix == ".json" and _unpacked(path, 1 << 10).lstrip()[:1] == b"[":
            try:
                return cls.of(orjson.loads(_unpacked(path))[:most], str(path))
            except orjson.JSONDecodeError as error:
                raise RecipeError(f"{path} is no JSON: {error}") from None
        text = _unpacked(path, None if head is None else head.bytes)
        if head is not None and len(text) == head.bytes:
            text = text[: text.rfind(b"\n") + 1]  # its last line may be half a row
        return cls(text, str(path), numbered="line", most=most)

    @classmethod
    def of(cls, rows: Iterable[Any], name: str) -> JsonRows:
        """Rows that are here already. Raises `RecipeError` for one that is no JSON object."""
        text = bytearray()
        for number, row in enumerate(rows):
            try:
                text += orjson.dumps(row) + b"\n"
            except TypeError as error:
                raise RecipeError(f"{name} row {number}: {error}") from None
        return cls(bytes(text), name)

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, index: int) -> Row:
        """One row."""
        line = self._text[self._starts[index] : self._ends[index]]
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise RecipeError(f"{self.place(index)}: expected a JSON object, got no JSON: {error}") from None
        if not isinstance(row, dict):
            raise RecipeError(f"{self.place(index)}: expected an object with fields, got {line[:80].decode()!r}")
        return row

    def scan(self, fields: frozenset[str]) -> Iterator[Row]:
        """All rows, with all their fields."""
        return map(self.row, range(len(self)))

    def unread(self, index: int) -> tuple[str, ...]:
        """None: rows are read whole."""
        return ()

    def place(self, index: int) -> str:
        """`train.jsonl line 18`, counted from 1 as editors do, or `train.csv row 17`."""
        number = index
        if self._numbered == "line":
            number = self._text.count(b"\n", 0, int(self._starts[index])) + 1
        return f"{self._name} {self._numbered} {number}"


@final
class RowSequence:
    """DataRows that somebody else keeps, such as what a user's function returned."""

    def __init__(self, rows: Sequence[Any], name: str) -> None:
        self._rows = rows
        self._name = name

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Row:
        """One row."""
        row = self._rows[index]
        if not isinstance(row, dict):
            raise RecipeError(f"{self.place(index)}: expected a dict with prompt and answer, got {row!r:.80}")
        return row

    def scan(self, fields: frozenset[str]) -> Iterator[Row]:
        """All rows, with all their fields."""
        return map(self.row, range(len(self)))

    def unread(self, index: int) -> tuple[str, ...]:
        """None: rows are whole."""
        return ()

    def place(self, index: int) -> str:
        """`my.py:problems row 17`."""
        return f"{self._name} row {index}"


@final
class ChainedRows:
    """The rows of several files, one file after the other."""

    def __init__(self, parts: Sequence[DataRows]) -> None:
        self._parts = tuple(parts)
        self._ends = list(itertools.accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def row(self, index: int) -> Row:
        """One row."""
        part, within = self._found(index)
        return part.row(within)

    def scan(self, fields: frozenset[str]) -> Iterator[Row]:
        """All rows."""
        return itertools.chain.from_iterable(part.scan(fields) for part in self._parts)

    def unread(self, index: int) -> tuple[str, ...]:
        """Those of the row's own file."""
        part, within = self._found(index)
        return part.unread(within)

    def place(self, index: int) -> str:
        """The place in the row's own file."""
        part, within = self._found(index)
        return part.place(within)

    def _found(self, index: int) -> tuple[DataRows, int]:
        number = bisect.bisect_right(self._ends, index)
        return self._parts[number], index - (self._ends[number - 1] if number else 0)


def suffix_of(path: Path) -> str:
    """`.jsonl` of `train.jsonl` and of `train.jsonl.gz`."""
    return Path(path.stem).suffix.lower() if path.suffix == ".gz" else path.suffix.lower()


def _lines(text: bytes) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Where each line that is not blank begins and ends, i64 [N] each."""
    view = np.frombuffer(text, np.uint8)
    found = [
        np.flatnonzero(view[at : at + _CHUNK_BYTES] == _NEWLINE).astype(np.int64) + at
        for at in range(0, len(view), _CHUNK_BYTES)
    ]
    ends = np.concatenate([*found, np.array([len(text)], np.int64)])
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1] + 1])
    # A line of a few bytes may be blank; longer ones are no object at the worst, which is an error of its own.
    short = np.flatnonzero(ends - starts < 3)
    blank = [at for at in short.tolist() if not text[starts[at] : ends[at]].strip()]
    return np.delete(starts, blank), np.delete(ends, blank)


def _unpacked(path: Path, most: int | None = None) -> bytes:
    """What the file holds, or the first `most` bytes of it."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return file.read(-1 if most is None else most).removeprefix(_MARK)
    except (OSError, EOFError, zlib.error) as error:
        raise RecipeError(f"{path} cannot be read: {error}") from None


def _csv_rows(text: bytes, path: Path) -> Iterator[Row]:
    try:
        reader = csv.DictReader(io.StringIO(text.decode(), newline=""), strict=True)
        for number, row in enumerate(reader):
            if None in row or None in row.values():
                raise RecipeError(
                    f"{path} row {number}: expected the {len(reader.fieldnames or ())} fields of the first line, "
                    "got more or fewer"
                )
            yield dict(row)
    except (csv.Error, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is no CSV: {error}") from None
