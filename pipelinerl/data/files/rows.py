"""`DataRows`: the rows of a data set, from JSON lines, JSON arrays, CSV, Parquet or Arrow files.

JSON rows are parsed on demand: only the text and the offset of each row are kept in memory. `files/values.py` says what
a value becomes. Only `ArrowRows` imports pyarrow.
"""

from __future__ import annotations

import bisect
import csv
import gzip
import io
import itertools
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pipelinerl.data.files.values import DECODER, decode, plain
from pipelinerl.errors import RecipeError

Row = dict[str, Any]
#: Start and end offset of each row in a text, i64 [N] each.
_Bounds = tuple[NDArray[np.int64], NDArray[np.int64]]

_NEWLINE: Final = 10
#: UTF-8 byte order mark.
_MARK: Final = b"\xef\xbb\xbf"
#: Number of bytes scanned for newlines at a time; numpy needs as much memory for the mask.
_CHUNK_BYTES: Final = 1 << 24
_IS_SPACE: Final = np.isin(np.arange(256), list(b" \t\r\v\f"))
#: The white space around the elements of a JSON array.
_SEPARATED: Final = re.compile(r"[ \t\r\n]*")
#: A compressed file may unpack to this number of bytes, or to this multiple of its size. Text is seldom packed better
#: than 1 : 50; a file that unpacks without end is packed 1 : 1000.
_UNPACKED_BYTES: Final = 1 << 28
_UNPACKED_RATIO: Final = 200


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
        return map(self.row, range(len(self)))

    def place(self, index: int) -> str:
        """Return the row's location for messages: file and line, or file and row number."""
        ...

    def unread(self, index: int) -> tuple[str, ...]:
        """Return the names of the fields that exist in the row's file but were not read; by default, there are none."""
        return ()


class JsonRows(DataRows):
    """Rows kept as the text of their JSON objects; CSV is converted to this form."""

    def __init__(self, text: bytes, bounds: _Bounds, name: str, *, numbered: str = "row") -> None:
        self._text = text
        self._name = name
        self._numbered = numbered
        self._starts, self._ends = bounds

    @classmethod
    def read(cls, path: Path, head: FirstRows | None = None) -> JsonRows:
        """Read JSON lines, a JSON array or CSV, even compressed, up to `head`. Raises `RecipeError`."""
        suffix, most = suffix_of(path), None if head is None else head.rows
        if suffix == ".csv":
            rows = itertools.islice(_csv_rows(_unpacked(path), path), most)
            text = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
            return cls(text, _lines(text), str(path))
        if suffix == ".json" and _unpacked(path, 1 << 10).lstrip()[:1] == b"[":
            return cls(*_elements(_unpacked(path), path, most), str(path))
        text = _unpacked(path, None if head is None else head.bytes)
        if head is not None and len(text) == head.bytes:
            text = text[: text.rfind(b"\n") + 1]  # drop the last line, which may be incomplete
        starts, ends = _lines(text)
        return cls(text, (starts[:most], ends[:most]), str(path), numbered="line")

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, index: int) -> Row:
        line = self._text[self._starts[index] : self._ends[index]]
        try:
            row = decode(line)
        except ValueError as error:
            raise RecipeError(f"{self.place(index)}: expected a JSON object, got invalid JSON: {error}") from None
        if not isinstance(row, dict):
            shown = line[:80].decode(errors="replace")
            raise RecipeError(f"{self.place(index)}: expected an object with fields, got {shown!r}")
        return row

    def place(self, index: int) -> str:
        number = index
        if self._numbered == "line":
            number = self._text.count(b"\n", 0, int(self._starts[index])) + 1
        return f"{self._name} {self._numbered} {number}"


class RowSequence(DataRows):
    """Rows of a Python sequence, such as the result of a user's function."""

    def __init__(self, rows: Sequence[Any], name: str) -> None:
        self._rows = rows
        self._name = name

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Row:
        row = self._rows[index]
        if not isinstance(row, dict):
            raise RecipeError(f"{self.place(index)}: expected a dict with prompt and answer, got {row!r:.80}")
        return row

    def place(self, index: int) -> str:
        return f"{self._name} row {index}"


class ChainedRows:
    """The rows of several files, one file after the other."""

    def __init__(self, parts: Sequence[DataRows]) -> None:
        self._parts = tuple(parts)
        self._ends = list(itertools.accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def row(self, index: int) -> Row:
        part, within = self._locate(index)
        return part.row(within)

    def scan(self, fields: frozenset[str]) -> Iterator[Row]:
        return itertools.chain.from_iterable(part.scan(fields) for part in self._parts)

    def unread(self, index: int) -> tuple[str, ...]:
        part, within = self._locate(index)
        return part.unread(within)

    def place(self, index: int) -> str:
        part, within = self._locate(index)
        return part.place(within)

    def _locate(self, index: int) -> tuple[DataRows, int]:
        number = bisect.bisect_right(self._ends, index)
        return self._parts[number], index - (self._ends[number - 1] if number else 0)


def suffix_of(path: Path) -> str:
    """Return the suffix of a file's name without `.gz`: `.jsonl` for `train.jsonl` and for `train.jsonl.gz`."""
    return Path(path.stem).suffix.lower() if path.suffix == ".gz" else path.suffix.lower()


def _lines(text: bytes) -> _Bounds:
    """Return the start and end offset of each line that is not blank, i64 [N] each."""
    view, start = np.frombuffer(text, np.uint8), 0
    kept: list[_Bounds] = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
    for at in range(0, len(view), _CHUNK_BYTES):
        ends = np.flatnonzero(view[at : at + _CHUNK_BYTES] == _NEWLINE).astype(np.int64) + at
        if at + _CHUNK_BYTES >= len(view):
            ends = np.append(ends, len(view))
        if len(ends):
            starts = np.concatenate([np.array([start], np.int64), ends[:-1] + 1])
            start = int(ends[-1]) + 1
            filled = starts < ends
            starts, ends = starts[filled], ends[filled]
            # For speed, only lines of up to two bytes are removed if blank; longer ones fail later, as invalid JSON.
            filled = (ends - starts > 2) | ~(_IS_SPACE[view[starts]] & _IS_SPACE[view[ends - 1]])
            kept.append((starts[filled], ends[filled]))
    starts, ends = (np.concatenate(parts) for parts in zip(*kept, strict=True))
    return starts, ends


def _elements(content: bytes, path: Path, most: int | None) -> tuple[bytes, _Bounds]:
    """Return the text of a JSON array's elements, at most `most`, with the start and end offset of each, i64 [N]."""
    joined, ends = bytearray(), [0]
    try:
        text = content.decode()
        at = _SEPARATED.match(text, text.index("[") + 1).end()  # type: ignore[union-attr]
        is_over = text[at : at + 1] == "]"
        while not is_over and (most is None or len(ends) <= most):
            first, (_, at) = at, DECODER.raw_decode(text, at)
            joined += text[first:at].encode()
            ends.append(len(joined))
            at = _SEPARATED.match(text, at).end()  # type: ignore[union-attr]
            is_over = text[at : at + 1] == "]"
            if not is_over:
                if text[at : at + 1] != ",":
                    raise ValueError(f"expected a comma or the array's end at character {at}")
                at = _SEPARATED.match(text, at + 1).end()  # type: ignore[union-attr]
        if is_over and text[at + 1 :].strip():
            raise ValueError(f"text follows the array's end at character {at}")
    except RecursionError:
        raise RecipeError(f"{path} row {len(ends) - 1}: its values are nested too deeply") from None
    except ValueError as error:  # raised for invalid UTF-8, too
        raise RecipeError(f"{path} is not valid JSON: row {len(ends) - 1}: {error}") from None
    offsets = np.array(ends, np.int64)
    return bytes(joined), (offsets[:-1], offsets[1:])


def _unpacked(path: Path, most: int | None = None) -> bytes:
    try:
        if path.suffix != ".gz":
            with path.open("rb") as file:
                return file.read(-1 if most is None else most).removeprefix(_MARK)
        limit = max(_UNPACKED_BYTES, _UNPACKED_RATIO * path.stat().st_size)
        with gzip.open(path) as packed:
            content = packed.read(limit + 1 if most is None else min(most, limit + 1))
    except (OSError, EOFError, zlib.error) as error:
        raise RecipeError(f"{path} cannot be read: {error}") from None
    if len(content) > limit:
        raise RecipeError(
            f"{path} unpacks to more than {_UNPACKED_RATIO} times its size, as damaged or hostile files do; if it is "
            "right, unpack it"
        )
    return content.removeprefix(_MARK)


def _csv_rows(text: bytes, path: Path) -> Iterator[Row]:
    try:
        reader = csv.DictReader(io.StringIO(text.decode(), newline=""), strict=True)
        refuse_repeated(reader.fieldnames or (), str(path))
        for number, row in enumerate(reader):
            if None in row or None in row.values():
                raise RecipeError(
                    f"{path} row {number}: expected the {len(reader.fieldnames or ())} fields of the first line, "
                    "got more or fewer"
                )
            yield dict(row)
    except (csv.Error, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not valid CSV: {error}") from None


def refuse_repeated(columns: Iterable[str], name: str) -> None:
    """Raise `RecipeError` if two columns of a file have the same name."""
    if twice := [column for column, count in Counter(columns).items() if count > 1]:
        raise RecipeError(f"{name} has several columns {twice[0]!r}; rename all but one")


#: Errors of pyarrow for a value that Python cannot hold, such as a date after the year 9999 or invalid UTF-8.
_UNCONVERTED: Final = (ValueError, OverflowError, LookupError, NotImplementedError)
#: Number of rows that `scan` converts to Python values at a time.
_AT_A_TIME: Final = 4096
#: Number of rows per batch when only the first rows of a file are read; a row may be large.
_LOOKED_AT: Final = 256


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
        """Read the columns `fields` (None: all) up to `head`. Raises `RecipeError` if pyarrow cannot."""
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ModuleNotFoundError:
            raise RecipeError(f"{path} is read by pyarrow, which is not installed; pip install -e '.[data]'") from None
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
                refuse_repeated(names, str(path))
                table = table.select([name for name in names if fields is None or name in fields])
                table = table if head is None else table.slice(0, head.rows)
        except (pa.ArrowException, OSError) as error:
            raise RecipeError(f"{path} cannot be read: {error}") from None
        refuse_repeated(table.column_names, str(path))
        if fields is not None:
            _refuse_not_finite(table, str(path))
        return cls(table, str(path), also=tuple(name for name in names if name not in table.column_names))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, index: int) -> Row:
        number = bisect.bisect_right(self._ends, index)
        within = index - (self._ends[number - 1] if number else 0)
        try:
            (row,) = self._batches[number].slice(within, 1).to_pylist()
        except _UNCONVERTED as error:
            raise RecipeError(f"{self.place(index)} cannot be converted: {error}") from None
        return {**dict.fromkeys(self._also), **{name: without_nulls(value) for name, value in row.items()}}

    def scan(self, fields: frozenset[str]) -> Iterator[Row]:
        for batch, end in zip(self._batches, self._ends, strict=True):
            names = [name for name in batch.schema.names if name in fields]
            for first in range(0, batch.num_rows, _AT_A_TIME):
                part = batch.slice(first, _AT_A_TIME)
                try:
                    columns = [part.column(name).to_pylist() for name in names]
                except _UNCONVERTED:
                    begin = end - batch.num_rows + first
                    yield from map(self.row, range(begin, begin + part.num_rows))  # the error names the row
                    continue
                if not columns:
                    yield from ({} for _ in range(part.num_rows))
                for at in [at for at, name in enumerate(names) if name in self._nested]:
                    columns[at] = [without_nulls(value) for value in columns[at]]
                for values in zip(*columns, strict=True):
                    yield dict(zip(names, values, strict=True))

    def unread(self, index: int) -> tuple[str, ...]:
        return self._also

    def place(self, index: int) -> str:
        return f"{self._name} row {index}"


def without_nulls(value: Any) -> Any:
    """Remove null fields of structs at any depth. Nulls in lists stay, since positions matter there."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _refuse_not_finite(table: Any, name: str) -> None:
    """Raise `RecipeError`, which names the row, if a column holds NaN or infinity at any depth."""
    import pyarrow.compute as pc

    for field in table.column_names:
        leaves = itertools.chain.from_iterable(map(_floats, table.column(field).chunks))
        if any(pc.all(pc.is_finite(leaf)).as_py() is False for leaf in leaves):
            for number, value in enumerate(table.column(field).to_pylist()):
                try:
                    plain(value, field)
                except RecipeError as error:
                    raise RecipeError(f"{name} row {number}: {error}") from None


def _floats(array: Any) -> Iterator[Any]:
    """Yield the arrays of floating numbers within an Arrow array, at any depth."""
    import pyarrow as pa

    kind = array.type
    if pa.types.is_float16(kind):
        yield array.cast(pa.float32())
    elif pa.types.is_floating(kind):
        yield array
    elif pa.types.is_struct(kind):
        yield from itertools.chain.from_iterable(_floats(array.field(number)) for number in range(kind.num_fields))
    elif pa.types.is_map(kind):
        yield from itertools.chain(_floats(array.keys), _floats(array.items))
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        yield from _floats(array.flatten())
    elif pa.types.is_dictionary(kind):
        yield from _floats(array.dictionary)


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
