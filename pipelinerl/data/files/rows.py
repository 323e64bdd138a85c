"""`DataRows`: the rows of a data set, from JSON lines, JSON arrays, CSV, Parquet or Arrow files.

JSON rows are parsed on demand: only the text and the offset of each row are kept in memory. Only `ArrowRows` imports
pyarrow.
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
#: UTF-8 byte order mark.
_MARK: Final = b"\xef\xbb\xbf"
#: Number of bytes scanned for newlines at a time; numpy needs as much memory for the mask.
_CHUNK_BYTES: Final = 1 << 26


class FirstRows(NamedTuple):
    """Limits for reading only a file's beginning: rows, and bytes for formats that can be read in part."""

    rows: int
    bytes: int


class DataRows(Protocol):
    """Interface of a data set's rows, which are numbered from 0."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def row(self, index: int) -> Row:
        """Return one row as a dict of its fields. Raises `RecipeError` for a row that cannot be read."""
        ...

    def scan(self, fields: frozenset[str]) -> Iterator[Row]:
        """Yield all rows in order, with at least those of `fields` that the row has. Raises `RecipeError`."""
        ...

    def place(self, index: int) -> str:
        """Return the row's location for messages: file and line, or file and row number."""
        ...

    def unread(self, index: int) -> tuple[str, ...]:
        """Return the names of the fields that exist in the row's file but were not read."""
        ...


@final
class JsonRows:
    """Rows kept as one JSON object per line; JSON arrays and CSV are converted to this form."""

    def __init__(self, text: bytes, name: str, *, numbered: str = "row", most: int | None = None) -> None:
        self._text = text
        self._name = name
        self._numbered = numbered
        self._starts, self._ends = (each[:most] for each in _lines(text))

    @classmethod
    def read(cls, path: Path, head: FirstRows | None = None) -> JsonRows:
        """Read JSON lines, a JSON array or CSV, possibly compressed (`.gz`), up to the limits `head`.

        Raises `RecipeError` if the file cannot be read, or its content does not match its suffix.
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
            text = text[: text.rfind(b"\n") + 1]  # drop the last line, which may be incomplete
        return cls(text, str(path), numbered="line", most=most)

    @classmethod
    def of(cls, rows: Iterable[Any], name: str) -> JsonRows:
        """Build `JsonRows` from Python values. Raises `RecipeError` for a row that cannot be written as JSON."""
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
        """Return the row's location: `train.jsonl line 18`, counted from 1, or `train.csv row 17`, counted from 0."""
        number = index
        if self._numbered == "line":
            number = self._text.count(b"\n", 0, int(self._starts[index])) + 1
        return f"{self._name} {self._numbered} {number}"


@final
class RowSequence:
    """Rows of a Python sequence, such as the result of a user's function."""

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
        """Return the row's location: `my.py:problems row 17`."""
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
        """Yield all rows, file by file."""
        return itertools.chain.from_iterable(part.scan(fields) for part in self._parts)

    def unread(self, index: int) -> tuple[str, ...]:
        """Return the names of the fields that exist in the row's file but were not read."""
        part, within = self._locate(index)
        return part.unread(within)

    def place(self, index: int) -> str:
        """Return the row's location in its file."""
        part, within = self._locate(index)
        return part.place(within)

    def _locate(self, index: int) -> tuple[DataRows, int]:
        number = bisect.bisect_right(self._ends, index)
        return self._parts[number], index - (self._ends[number - 1] if number else 0)


def suffix_of(path: Path) -> str:
    """Return the suffix of a file's name without `.gz`: `.jsonl` for `train.jsonl` and for `train.jsonl.gz`."""
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
    # For speed, only lines of up to two bytes are removed if blank; longer blank lines fail later, as invalid JSON.
    short = np.flatnonzero(ends - starts < 3)
    blank = [at for at in short.tolist() if not text[starts[at] : ends[at]].strip()]
    return np.delete(starts, blank), np.delete(ends, blank)


def _unpacked(path: Path, most: int | None = None) -> bytes:
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


#: Number of rows that `scan` converts to Python values at a time.
_AT_A_TIME: Final = 4096
#: Number of rows per batch when only the first rows of a file are read; a row may be large.
_LOOKED_AT: Final = 256


@final
class ArrowRows:
    """The rows of one Parquet or Arrow file, of which only the needed columns are read.

    Rows stay in Arrow's columns until they are requested. Arrow gives every struct the fields of all rows, so fields
    that are null in a row are removed from it.
    """

    def __init__(self, table: Any, name: str, *, also: tuple[str, ...] = ()) -> None:
        """Wrap a `pyarrow.Table`; `also` names the file's columns that were not read into the table."""
        import pyarrow as pa

        self._name = name
        self._also = also
        self._batches = table.to_batches()
        self._ends = list(itertools.accumulate(batch.num_rows for batch in self._batches))
        self._nested = frozenset(field.name for field in table.schema if pa.types.is_nested(field.type))

    @classmethod
    def read(cls, path: Path, fields: frozenset[str] | None, head: FirstRows | None = None) -> ArrowRows:
        """Read the columns `fields`, or all columns if `fields` is None; `head` limits the number of rows.

        Raises `RecipeError` if pyarrow is not installed, or cannot read the file.
        """
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ModuleNotFoundError:
            raise RecipeError(
                f"{path} is read by pyarrow, which is not installed; pip install 'pipelinerl[data]'"
            ) from None
        try:
            if path.suffix == ".parquet":
                with pq.ParquetFile(path) as file:
                    names = file.schema_arrow.names
                    columns = [name for name in names if fields is None or name in fields]
                    table = file.read(columns=columns) if head is None else _beginning(file, columns, head)
            else:
                with pa.memory_map(str(path)) as source:
                    table = _ipc_reader(source).read_all()
                names = table.column_names
                table = table.select([name for name in names if fields is None or name in fields])
                table = table if head is None else table.slice(0, head.rows)
        except (pa.ArrowException, OSError) as error:
            raise RecipeError(f"{path} cannot be read: {error}") from None
        return cls(table, str(path), also=tuple(name for name in names if name not in table.column_names))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, index: int) -> Row:
        """Return one row, with None for columns that were not read."""
        number = bisect.bisect_right(self._ends, index)
        within = index - (self._ends[number - 1] if number else 0)
        (row,) = self._batches[number].slice(within, 1).to_pylist()
        return {**dict.fromkeys(self._also), **{name: without_nulls(value) for name, value in row.items()}}

    def scan(self, fields: frozenset[str]) -> Iterator[Row]:
        """Yield all rows, with only those `fields` that the file has."""
        for batch in self._batches:
            names = [name for name in batch.schema.names if name in fields]
            for first in range(0, batch.num_rows, _AT_A_TIME):
                part = batch.slice(first, _AT_A_TIME)
                columns = [part.column(name).to_pylist() for name in names]
                if not columns:
                    yield from ({} for _ in range(part.num_rows))
                for at in [at for at, name in enumerate(names) if name in self._nested]:
                    columns[at] = [without_nulls(value) for value in columns[at]]
                for values in zip(*columns, strict=True):
                    yield dict(zip(names, values, strict=True))

    def unread(self, index: int) -> tuple[str, ...]:
        """Return the names of the file's columns that were not read."""
        return self._also

    def place(self, index: int) -> str:
        """Return the row's location: `train.parquet row 17`, counted from 0."""
        return f"{self._name} row {index}"


def without_nulls(value: Any) -> Any:
    """Remove null fields of structs at any depth. Nulls in lists stay, since positions matter there."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _beginning(file: Any, columns: list[str], head: FirstRows) -> Any:
    import pyarrow as pa

    batches, rows, size = [], 0, 0
    for batch in file.iter_batches(batch_size=_LOOKED_AT, columns=columns):
        batches.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= head.rows or size >= head.bytes:
            break
    table = pa.Table.from_batches(batches) if batches else file.schema_arrow.empty_table().select(columns)
    return table.slice(0, head.rows)


def _ipc_reader(source: Any) -> Any:
    """Open an Arrow file in the stream format, which `datasets` writes, or in the file format."""
    import pyarrow as pa

    try:
        return pa.ipc.open_stream(source)
    except pa.ArrowInvalid:
        return pa.ipc.open_file(source)
