"""What a large data set costs: opening a Parquet file of a million rows, what it takes of memory, problems per second.

Each open is a process of its own, since memory once taken is seldom given back and the rows of a file are kept for who
opens it next. Times are those of the processor, which a machine's other work leaves alone; ÷ one of the same columns
made Python objects, which is the obvious way to do it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from benchmarks.measure import Row, print_table, write_record

ROWS: Final = 1_000_000
_DEADLINE_S: Final = 600.0

_OPEN: Final = """
import json, resource, sys, time

def used():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

import pyarrow.parquet as pq
from pipelinerl.data.problems import Split, open_source
path, arm = sys.argv[1:]
before, begun = used(), time.process_time()
if arm == "objects":
    rows = pq.read_table(path).to_pylist()
    print(json.dumps({"open_s": time.process_time() - begun, "mib": used() - before}))
    sys.exit()
parameters = {"path": path, "prompt_field": "question", "tag_fields": ["level"]}
source = open_source("files", domain="d", split=Split.TRAIN, seed=0, parameters=parameters)
opened, taken = time.process_time() - begun, used() - before
begun = time.process_time()
for index in range(30_000):
    source.problem(index)
rate = 30_000 / (time.process_time() - begun)
print(json.dumps({"open_s": opened, "mib": taken, "problems_per_s": rate, "problems": len(source)}))
"""


def written(path: Path, rows: int) -> Path:
    """A table of questions of about a hundred characters, in ten parts."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    fields = pa.schema([("question", pa.string()), ("answer", pa.string()), ("level", pa.int64())])
    with pq.ParquetWriter(path, fields) as writer:
        for first in range(0, rows, rows // 10):
            numbers = range(first, first + rows // 10)
            questions = [
                f"What is {i} + {7 * i}, if each of {i % 13} apples weighs what two pears weigh?" for i in numbers
            ]
            columns = {
                "question": questions,
                "answer": [str(8 * i) for i in numbers],
                "level": [i % 5 for i in numbers],
            }
            writer.write_table(pa.table(columns, schema=fields))
    return path


def opened(path: Path, arm: str) -> dict[str, float]:
    """The figures of one process that opens the file as a source, or as Python objects."""
    command = [sys.executable, "-c", _OPEN, str(path), arm]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def run(quick: bool) -> None:
    """Print the table and write the record."""
    rows = ROWS // 20 if quick else ROWS
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder) / "train.parquet", rows)
        size = path.stat().st_size / 2**20
        ours, objects = opened(path, "source"), opened(path, "objects")
    print_table(
        f"files: {rows:,} rows of Parquet, {size:.0f} MiB",
        [
            Row("opening, s of one core", ours["open_s"], "<= 5", ours["open_s"] <= 5),
            Row("opening ÷ all rows as Python objects", ours["open_s"] / objects["open_s"]),
            Row("memory, MiB", ours["mib"], "<= 400", ours["mib"] <= 400),
            Row(
                "memory ÷ all rows as Python objects",
                ours["mib"] / objects["mib"],
                "<= 0.5",
                ours["mib"] <= objects["mib"] / 2,
            ),
            Row("problems per second", ours["problems_per_s"], ">= 3000", ours["problems_per_s"] >= 3000),
        ],
    )
    if not quick:
        write_record("data_files", {"rows": rows, "source": ours, "objects": objects})
