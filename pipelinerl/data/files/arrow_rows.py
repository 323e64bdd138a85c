"""`ArrowRows`: rows of Parquet files, and of the Arrow files that `datasets` saves; pyarrow reads both.

Rows stay in Arrow's columns until they are requested, and only the needed columns are read. Arrow gives every struct
the fields of all rows. Fields that are null in a row are therefore removed from that row.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, final

from pipelinerl.data.files.rows import FirstRows, Row
from pipelinerl.errors import RecipeError

#: Number of rows converted to Python values at a time when all rows are scanned.
_AT_A_TIME: Final = 4096
#: Number of rows per batch when only the first rows of a file are read: few, since each row may be large.
_LOOKED_AT: Final = 256


@final
class ArrowRows:
    """The rows of one file."""

    def __init__(self, table: Any, name: str, *, also: tuple[str, ...] = ()) -> None:
        """Wrap the `pyarrow.Table` `table`; `also` names columns that the file has but `table` lacks."""
        import pyarrow as pa

        self._name = name
        self._also = also
        self._batches = table.to_batches()
        self._ends = list(itertools.accumulate(batch.num_rows for batch in self._batches))
        self._nested = frozenset(field.name for field in table.schema if pa.types.is_nested(field.type))

    @classmethod
    def read(cls, path: Path, fields: frozenset[str] | None, head: FirstRows | None = None) -> ArrowRows:
        """Read from the file those of the columns `fields` that it has, or all columns if `fields` is None.

        With a `head`, read only that much of the file.

        Raises:
            RecipeError: pyarrow is not installed, or cannot read the file.
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
        """Return one row; columns that were not read are None in it."""
        number = bisect.bisect_right(self._ends, index)
        within = index - (self._ends[number - 1] if number else 0)
        (row,) = self._batches[number].slice(within, 1).to_pylist()
        return {**dict.fromkeys(self._also), **{name: without_nulls(value) for name, value in row.items()}}

    def scan(self, fields: frozenset[str]) -> Iterator[Row]:
        """Yield all rows with these fields."""
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
        """Return the file's columns that were not read."""
        return self._also

    def place(self, index: int) -> str:
        """Return a row's name for messages: `train.parquet row 17`, counted from 0."""
        return f"{self._name} row {index}"


def without_nulls(value: Any) -> Any:
    """Remove null fields of structs at any depth; nulls in lists stay, since positions matter there."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _beginning(file: Any, columns: list[str], head: FirstRows) -> Any:
    """Return the first rows of a `ParquetFile`, as a table."""
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
    """Open an Arrow file in either format: `datasets` writes streams, other writers write files."""
    import pyarrow as pa

    try:
        return pa.ipc.open_stream(source)
    except pa.ArrowInvalid:
        return pa.ipc.open_file(source)
