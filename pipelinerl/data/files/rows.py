"""`DataRows`: the rows of a data set, each parsed on demand, from JSON lines, JSON arrays or CSV.

Only the file's text and the offset of each row are kept in memory, so a million rows do not become a million Python
objects. `arrow_rows.py` reads the formats that need pyarrow.
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
#: UTF-8 byte order mark, which some editors write.
_MARK: Final = b"\xef\xbb\xbf"
#: Number of bytes scanned for newlines at a time; numpy needs a byte of mask for each.
_CHUNK_BYTES: Final = 1 << 26


class FirstRows(NamedTuple):
    """Limit of a check before a run: the number of rows, and the number of bytes of a file that can be read in part."""

    rows: int
    bytes: int


class DataRows(Protocol):
    """Rows by number, from 0."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def row(self, index: int) -> Row:
        """Return one row, by field. Raises `RecipeError` for a row that cannot be read."""
        ...

    def scan(self, fields: frozenset[str]) -> Iterator[Row]:
        """Yield all rows in order. Each has at least those of `fields` that exist in the data. Raises as `row` does."""
        ...

    def place(self, index: int) -> str:
        """Return the row's name for messages: file and line, or file and number."""
        ...

    def unread(self, index: int) -> tuple[str, ...]:
        """Return the names of the row's fields that were not read from its file."""
        ...


@final
class JsonRows:
    """One JSON object per line; other formats are converted to this form."""

    def __init__(self, text: bytes, name: str, *, numbered: str = "row", most: int | None = None) -> None:
        self._text = text
        self._name = name
        self._numbered = numbered
        self._starts, self._ends = (each[:most] for each in _lines(text))

    @classmethod
    def read(cls, path: Path, head: FirstRows | None = None) -> JsonRows:
        """Read a file of JSON lines, a JSON array or CSV; a file whose name also ends in `.gz` is unpacked.

        Args:
            head: limit on the amount to read. JSON arrays and CSV are read whole and then cut, having no lines.

        Raises:
            RecipeError: the file cannot be read, or its content does not match its suffix.
        """
        suffix, most = suffix_of(path), None if head is None else head.rows
        if suffix == ".csv":
            return cls.of(itertools.islice(_csv_rows(_unpacked(path), path), most), str(path))
        if suffix == ".json" and _unpacked(path, 1 << 10).lstrip()[:1] == b"[":
            try:
                return cls.of(orjson.loads(_unpacked(path))[:most], str(path))
            except orjson.JSONDecodeError as error:
                raise RecipeError(f"{path} is not valid JSON: {error}") from None
        text = _unpacked(path, None if head is None else head.bytes)
        if head is not None and len(text) == head.bytes:
            text = text[: text.rfind(b"\n") + 1]  # the last line may be cut off
        return cls(text, str(path), numbered="line", most=most)

    @classmethod
    def of(cls, rows: Iterable[Any], name: str) -> JsonRows:
        """Wrap rows that are already in memory. Raises `RecipeError` for a row that is not a JSON object."""
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
        """Return one row."""
        line = self._text[self._starts[index] : self._ends[index]]
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise RecipeError(f"{self.place(index)}: expected a JSON object, got invalid JSON: {error}") from None
        if not isinstance(row, dict):
            raise RecipeError(f"{self.place(index)}: expected an object with fields, got {line[:80].decode()!r}")
        return row

    def scan(self, fields: frozenset[str]) -> Iterator[Row]:
        """Yield all rows, with all their fields."""
        return map(self.row, range(len(self)))

    def unread(self, index: int) -> tuple[str, ...]:
        """Return (): rows are always read completely."""
        return ()

    def place(self, index: int) -> str:
        """Return the row's name: `train.jsonl line 18`, counted from 1 as editors do, or `train.csv row 17`."""
        number = index
        if self._numbered == "line":
            number = self._text.count(b"\n", 0, int(self._starts[index])) + 1
        return f"{self._name} {self._numbered} {number}"


@final
class RowSequence:
    """Rows of an existing sequence, such as the result of a user's function."""

    def __init__(self, rows: Sequence[Any], name: str) -> None:
        self._rows = rows
        self._name = name

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Row:
        """Return one row."""
        row = self._rows[index]
        if not isinstance(row, dict):
            raise RecipeError(f"{self.place(index)}: expected a dict with prompt and answer, got {row!r:.80}")
        return row

    def scan(self, fields: frozenset[str]) -> Iterator[Row]:
        """Yield all rows, with all their fields."""
        return map(self.row, range(len(self)))

    def unread(self, index: int) -> tuple[str, ...]:
        """Return (): rows are always complete."""
        return ()

    def place(self, index: int) -> str:
        """Return the row's name for messages: `my.py:problems row 17`."""
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
        """Return one row."""
        part, within = self._locate(index)
        return part.row(within)

    def scan(self, fields: frozenset[str]) -> Iterator[Row]:
        """Yield all rows."""
        return itertools.chain.from_iterable(part.scan(fields) for part in self._parts)

    def unread(self, index: int) -> tuple[str, ...]:
        """Return the names of the fields that were not read from the row's own file."""
        part, within = self._locate(index)
        return part.unread(within)

    def place(self, index: int) -> str:
        """Return the row's name within its own file."""
        part, within = self._locate(index)
        return part.place(within)

    def _locate(self, index: int) -> tuple[DataRows, int]:
        number = bisect.bisect_right(self._ends, index)
        return self._parts[number], index - (self._ends[number - 1] if number else 0)


def suffix_of(path: Path) -> str:
    """Return the suffix without `.gz`: `.jsonl` for `train.jsonl` and for `train.jsonl.gz`."""
    return Path(path.stem).suffix.lower() if path.suffix == ".gz" else path.suffix.lower()


def _lines(text: bytes) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the start and end offset of each non-blank line, i64 [N] each."""
    view = np.frombuffer(text, np.uint8)
    newlines = [
        np.flatnonzero(view[at : at + _CHUNK_BYTES] == _NEWLINE).astype(np.int64) + at
        for at in range(0, len(view), _CHUNK_BYTES)
    ]
    ends = np.concatenate([*newlines, np.array([len(text)], np.int64)])
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1] + 1])
    # A check of every line would be slow. Only lines of a few bytes are checked for being blank; a longer blank line
    # later fails as an invalid object.
    short = np.flatnonzero(ends - starts < 3)
    blank = [at for at in short.tolist() if not text[starts[at] : ends[at]].strip()]
    return np.delete(starts, blank), np.delete(ends, blank)


def _unpacked(path: Path, most: int | None = None) -> bytes:
    """Return the file's content, or its first `most` bytes."""
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
        raise RecipeError(f"{path} is not valid CSV: {error}") from None
