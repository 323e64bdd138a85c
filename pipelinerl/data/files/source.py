"""`RowSource`: problems made from rows, and the source `files`, which reads rows from files of many formats.

A data set's own splits are used where it has them; other splits are taken from the training rows, by the hash of each
row's question. Rows of one task (equal question, answer and metadata, or equal `id_field`) become one problem.
Validation and held-out problems are never trained on: a training row with the same question as a row of another split's
files is dropped. With `split_by = "task"`, splits are made and kept apart by task instead of question. The source's
`summary` says how many rows each rule dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from pipelinerl import rng
from pipelinerl.data.files.field_map import FieldMap, with_answer
from pipelinerl.data.files.layouts import NAMES, Layout, layout_of
from pipelinerl.data.files.rows import ArrowRows, ChainedRows, DataRows, FirstRows, JsonRows
from pipelinerl.data.prompts import Prompts
from pipelinerl.data.source import ShuffledEpochs, SourceRequest, Split, are_of, digest_of
from pipelinerl.errors import MissingFieldError, RecipeError
from pipelinerl.types import Problem

#: Default field of the pass rate, to which `pipelinerl prefilter` writes it.
PASS_RATE: Final = "metadata.pass_rate"
#: Recipe parameters that set a curriculum.
ORDER: Final = ("order", "order_band", "order_over")
#: Default width of a curriculum's band, as a share of the problems.
_BAND: Final = 0.2
_MOST: Final = 10**8
#: Recipe parameter of a `SplitBy`.
SPLIT_BY: Final = "split_by"


class SplitBy(StrEnum):
    """The unit that must differ between splits: prompts, or only tasks, for data whose tasks share a prompt."""

    PROMPT = "prompt"
    TASK = "task"

    @classmethod
    def taken_from(cls, parameters: dict[str, Any], *, where: str) -> Self:
        """Remove `split_by` from a recipe's `parameters`, and return it. Raises `RecipeError` if it is invalid."""
        by = parameters.pop(SPLIT_BY, SplitBy.PROMPT)
        if by not in list(cls):
            raise RecipeError(f"{where}.parameters.{SPLIT_BY} must be {' or '.join(cls)}, got {by!r}")
        return cls(by)


class ProblemOrder(StrEnum):
    """Order of the training problems."""

    SHUFFLED = "shuffled"
    EASY_FIRST = "easy_first"
    HARD_FIRST = "hard_first"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """Order of the training problems by difficulty, as measured by the pass rates in the data set's rows (RLAX §6.2).

    A band moves over the problems, ranked from easy to hard; the next problem is one of those within the band:

        easy ┊······[=== band ===]··············┊ hard        progress through `over` ─▶

    A problem's position is its rank plus noise as wide as the band. A band of width 0 gives the strict order of
    difficulty, and a very wide band shuffles. After the first `over` problems, epochs are shuffled as without a
    curriculum. The order depends only on the seed and the data, so a resumed run continues where it stopped.

    Attributes:
        band: width of the band, as a share of the problems.
        over: number of problems during which the band moves from one end to the other; None for all of them.
    """

    order: ProblemOrder = ProblemOrder.SHUFFLED
    band: float = _BAND
    over: int | None = None

    @classmethod
    def taken_from(cls, parameters: dict[str, Any], *, where: str) -> Self:
        """Build a curriculum from a recipe's `parameters`, and remove the keys that it uses. Raises `RecipeError`."""
        order, band, over = (parameters.pop(key, None) for key in ORDER)
        if order is not None and order not in list(ProblemOrder):
            raise RecipeError(f"{where}.parameters.order must be one of {', '.join(ProblemOrder)}, got {order!r}")
        if order in (None, ProblemOrder.SHUFFLED) and not (band is None and over is None):
            raise RecipeError(f"{where}.parameters.order_band and order_over need an order, such as easy_first")
        if band is not None and (isinstance(band, bool) or not isinstance(band, int | float) or not 0 <= band <= 1):
            raise RecipeError(f"{where}.parameters.order_band must be a share from 0 to 1, got {band!r}")
        if over is not None and (isinstance(over, bool) or not isinstance(over, int) or not 1 <= over <= _MOST):
            raise RecipeError(f"{where}.parameters.order_over must be a number of problems, got {over!r}")
        return cls(order=ProblemOrder(order or "shuffled"), band=_BAND if band is None else float(band), over=over)

    def sweep(self, rates: NDArray[np.float64], *, seed: int) -> NDArray[np.int64]:
        """Return the order of the first `over` problems, as indices into `rates`, i64 [over].

        `rates` are the pass rates of all M problems; indices repeat if `over` exceeds M. Not for order `SHUFFLED`.
        """
        count, over = len(rates), self.over or len(rates)
        shuffled = rng.generator(seed, "curriculum", "ties").permutation(count)
        hardness = rates[shuffled] if self.order is ProblemOrder.HARD_FIRST else -rates[shuffled]
        ranks = np.empty(count)
        ranks[shuffled[np.argsort(hardness, kind="stable")]] = (np.arange(count) + 0.5) / count
        some = rng.generator(seed, "curriculum", "some").permutation(count)[: over % count]
        problems = np.concatenate([np.tile(np.arange(count), over // count), np.sort(some)]).astype(np.int64)
        noise = rng.generator(seed, "curriculum", "band").random(over) - 0.5
        return problems[np.argsort(ranks[problems] + self.band * noise, kind="stable")]


#: Recipe parameters for each split: the path of its files (`_PATHS`), and its name in the data set (`_SPLITS`).
_PATHS = {Split.TRAIN: "path", Split.VALIDATION: "validation_path", Split.HELD_OUT: "held_out_path"}
_SPLITS = {Split.TRAIN: "split", Split.VALIDATION: "validation_split", Split.HELD_OUT: "held_out_split"}
#: Number of file sets whose rows are cached, because a run, or a check of a recipe, opens the same files once per
#: split.
_KEPT = 8

_NO_CURRICULUM = Curriculum()

Files = tuple[Path, ...]


class Indexed(NamedTuple):
    """All N rows of some files, with two digests of each row, u64 [N].

    `tasks` tells tasks apart; `digests`, of the question or of the task (`SplitBy`), decide the split.
    """

    rows: DataRows
    digests: NDArray[np.uint64]
    tasks: NDArray[np.uint64]


class RowSource:
    """Problems of one split, made from the M rows whose numbers are in `chosen`, i64 [M].

    With a curriculum (docs/understand/curation.md), training begins with the rows in `sweep`, which lists their numbers
    in the curriculum's order; otherwise `sweep` is empty. Epochs follow, each shuffled differently. Problems of other
    splits come once, in a fixed order.
    """

    def __init__(
        self,
        indexed: Indexed,
        chosen: NDArray[np.int64],
        field_map: FieldMap,
        request: SourceRequest,
        *,
        sweep: NDArray[np.int64],
        summary: str,
    ) -> None:
        self.summary: Final = summary
        self._rows = indexed.rows
        self._columns = field_map
        self._prompts = prompts_of_rows(request)
        self._domain = request.domain
        self._sweep = sweep
        remedy = f"add rows to {request.split}_path"
        self._epochs = ShuffledEpochs(chosen, request, name="rows", what="problems", remedy=remedy)

    def __len__(self) -> int:
        return len(self._epochs)

    def problem(self, index: int) -> Problem:
        row = self._row(index)
        with placed(self._rows, row):
            return self._prompts.dress(self._columns.problem(self._rows.row(row), domain=self._domain))

    def place(self, index: int) -> str:
        return self._rows.place(self._row(index))

    def _row(self, index: int) -> int:
        if index < len(self._sweep):
            return int(self._sweep[index])
        return self._epochs.item(index - len(self._sweep))


def open_files(request: SourceRequest) -> RowSource:
    """Open the source `files`. Raises `RecipeError`, which names file, row and field."""
    files, field_map, curriculum, by = _parsed(request)
    indexed = {}
    for split, paths in files.items():
        stats = [(path, path.stat()) for path in paths]
        stamped = tuple((path, stat.st_size, stat.st_mtime_ns) for path, stat in stats)
        indexed[split] = _indexed(stamped, field_map, by)
    return source_of_rows(indexed, field_map, request, curriculum, by=by)


def _parsed(request: SourceRequest) -> tuple[dict[Split, Files], FieldMap, Curriculum, SplitBy]:
    """Parse the parameters without reading rows. Raises `RecipeError` for a missing file or an invalid parameter."""
    if request.argument:
        raise RecipeError(f"{request.where}.source must be files with parameters.path, got files:{request.argument}")
    parameters = dict(request.parameters)
    curriculum = Curriculum.taken_from(parameters, where=request.where)
    if curriculum.order is not ProblemOrder.SHUFFLED:
        parameters.setdefault("rate_field", PASS_RATE)
    field_map = FieldMap.taken_from(parameters, request.prompts.template, where=request.where)
    layouts = {split: _layout(parameters, split, request.where) for split in Split if _PATHS[split] in parameters}
    named = {split: parameters.pop(key, "") for split, key in _SPLITS.items()}
    if wrong := [key for split, key in _SPLITS.items() if not isinstance(named[split], str)]:
        raise RecipeError(
            f"{request.where}.parameters.{wrong[0]} must be the name of a split, got a value of another type"
        )
    by = SplitBy.taken_from(parameters, where=request.where)
    unknown = set(parameters) - {*_PATHS.values(), "config"}
    if unknown:
        known = ", ".join(
            (*_PATHS.values(), *_SPLITS.values(), "config", SPLIT_BY, *FieldMap.__dataclass_fields__, *ORDER)
        )
        raise RecipeError(f"{request.where}.parameters: unknown {', '.join(sorted(unknown))}; known: {known}")
    if Split.TRAIN not in layouts:
        raise RecipeError(f"{request.where}.parameters.path must be the path of a file or folder, got None")
    return files_of_splits(layouts, named, where=request.where), field_map, curriculum, by


def look_at_files(request: SourceRequest, head: FirstRows, check: Callable[[Problem], None]) -> Problem | None:
    """Build and `check` problems from the first rows of each file; return the first problem, or None without rows.

    Raises `RecipeError`, which names file, row and problem, if a problem is invalid or `check` raises one.
    """
    files, field_map, curriculum, _ = _parsed(request)
    prompts, first = prompts_of_rows(request), None
    ranked = files[Split.TRAIN] if curriculum.order is not ProblemOrder.SHUFFLED else ()
    for path in dict.fromkeys(chain.from_iterable(files.values())):
        rows = read_rows(path, field_map, head)
        for number in range(len(rows)):
            with placed(rows, number):
                row = rows.row(number)
                problem = prompts.dress(field_map.problem(row, domain=request.domain))
                check(problem)
                if path in ranked:
                    field_map.rate(row)
            first = first or problem
    return first


def source_of_rows(
    indexed: Mapping[Split, Indexed],
    field_map: FieldMap,
    request: SourceRequest,
    curriculum: Curriculum = _NO_CURRICULUM,
    *,
    by: SplitBy = SplitBy.PROMPT,
) -> RowSource:
    """Build the split's source, by default from training rows. Raises `RecipeError` if the split is empty."""
    split = request.split
    own = indexed.get(split, indexed[Split.TRAIN])
    chosen, summary = _chosen_rows(indexed, split, by)
    if not len(chosen):
        remedy = "add rows or name files for it"
        if by is SplitBy.PROMPT and len(own.rows):
            remedy += f', or set {SPLIT_BY} = "{SplitBy.TASK}" if rows with one prompt are different tasks'
        raise RecipeError(f"{request.where}: the {split} split of its files is empty ({summary}); {remedy}")
    sweep = chosen[:0]
    if split is Split.TRAIN and curriculum.order is not ProblemOrder.SHUFFLED:
        rates, fields = np.empty(len(own.rows)), {field_map.rate_field, field_map.rate_field.partition(".")[0]}
        for number, row in enumerate(own.rows.scan(frozenset(fields))):
            with placed(own.rows, number):
                rates[number] = field_map.rate(row)
        sweep = chosen[curriculum.sweep(rates[chosen], seed=request.seed)]
    return RowSource(own, chosen, field_map, request, sweep=sweep, summary=summary)


def _chosen_rows(indexed: Mapping[Split, Indexed], split: Split, by: SplitBy) -> tuple[NDArray[np.int64], str]:
    """Return the numbers of the split's rows, i64 [M], and a sentence on what became of the others."""
    own = indexed.get(split, indexed[Split.TRAIN])
    apart = [rows.digests for other, rows in indexed.items() if other not in (split, Split.TRAIN)]
    if split is Split.HELD_OUT and split in indexed:
        apart = []  # drop no question here: a question in several splits is dropped by the others
    _, first = np.unique(own.tasks, return_index=True)
    unique = np.sort(first).astype(np.int64)
    separate = unique[~np.isin(own.digests[unique], np.concatenate(apart))] if apart else unique
    chosen = separate
    if split not in indexed or split is Split.TRAIN:
        # Training rows that the hash assigns to another split are trained on if that split has its own files.
        wanted = {split} if split is not Split.TRAIN else {split, *indexed}
        chosen = separate[are_of(own.digests[separate], wanted)]
    others = "validation or held-out" if split is Split.TRAIN else "another split's"
    dropped = (
        (len(own.rows) - len(unique), "dropped as duplicates of another row"),
        (len(unique) - len(separate), f"dropped because a row of {others} files has their {by}"),
        (len(separate) - len(chosen), f"left to other splits by the hash of their {by}"),
    )
    parts = [f"{len(chosen):,} {split} problems", *(f"{count:,} {words}" for count, words in dropped if count)]
    return chosen, f"{len(own.rows):,} rows read: {', '.join(parts)}"


def prompts_of_rows(request: SourceRequest) -> Prompts:
    """Return the domain's prompt format without its template, since the `FieldMap` applies the template to rows."""
    return replace(request.prompts, template=None)


def index_of(rows: DataRows, field_map: FieldMap, by: SplitBy = SplitBy.PROMPT) -> Indexed:
    """Compute the digests of all rows. Raises `RecipeError` for a row that gives no problem."""
    questions, pairs = bytearray(), bytearray()
    plain, answer = field_map.plain_prompt, field_map.answer_field
    for number, row in enumerate(rows.scan(field_map.fields_of_text)):
        question, truth = row.get(plain), row.get(answer)
        try:
            if type(question) is str and not (question == "" or question.isspace()) and type(truth) is str:
                text = f"user\x1f{question}"  # fast path for rows of plain texts: it takes a third of the time
            else:
                field_map.check(row)
                text, truth = field_map.text(row), field_map.answer(row)
            field_map.metadata(row)  # only to reject invalid values; the columns of Arrow files are checked when read
            questions += digest_of(text)
            pairs += digest_of(with_answer(text, truth))
        except RecipeError:
            with placed(rows, number):  # read the whole row, so that the error lists all fields
                field_map.draft(rows.row(number))
            raise
    digests = np.frombuffer(bytes(questions), "<u8")
    tasks = _tasks(rows, field_map, np.frombuffer(bytes(pairs), "<u8").copy(), every=by is SplitBy.TASK)
    return Indexed(rows, tasks if by is SplitBy.TASK else digests, tasks)


def _tasks(rows: DataRows, field_map: FieldMap, pairs: NDArray[np.uint64], *, every: bool) -> NDArray[np.uint64]:
    """Return the digests of the rows' tasks, u64 [N], given those of their questions with answers.

    Only rows whose question and answer occur again are read whole, unless `every` task or an id is needed.
    """
    needed = np.ones(len(pairs), bool)
    if not every and not field_map.id_field:
        _, place, count = np.unique(pairs, return_inverse=True, return_counts=True)
        needed = count[place] > 1
    for number in np.flatnonzero(needed).tolist():
        with placed(rows, number):
            pairs[number] = int.from_bytes(field_map.task(rows.row(number)), "little")
    return pairs


@contextmanager
def placed(rows: DataRows, number: int) -> Iterator[None]:
    """Prefix each `RecipeError` raised in the `with` block with the row's location."""
    try:
        yield
    except RecipeError as cause:
        place, error = rows.place(number), cause
        if isinstance(cause, MissingFieldError):
            error = MissingFieldError(cause.field, {*cause.present, *rows.unread(number)})
        raise RecipeError(str(error) if str(error).startswith(place) else f"{place}: {error}") from None


def files_of_splits(layouts: Mapping[Split, Layout], named: Mapping[Split, str], *, where: str) -> dict[Split, Files]:
    """Return the files of the training split and of every other split with files of its own, by split.

    `layouts` holds the layout of each path in the recipe. `named` maps each split to the name that the recipe gives
    for it, or to "". Raises `RecipeError` if the data set has no split of that name, or if the recipe does not name
    a split that it must name.
    """
    pool = layouts[Split.TRAIN]
    train = _chosen(pool, Split.TRAIN, named[Split.TRAIN], where)
    files = {Split.TRAIN: pool[train]}
    others = {name: paths for name, paths in pool.items() if name != train}
    for split in (Split.VALIDATION, Split.HELD_OUT):
        if split in layouts:
            files[split] = layouts[split][_chosen(layouts[split], split, named[split], where)]
        elif named[split] or not others.keys().isdisjoint(NAMES[split]):
            files[split] = others[_chosen(others, split, named[split], where)]
    return files


def _chosen(layout: Layout, split: Split, name: str, where: str) -> str:
    if name:
        if name not in layout:
            known = ", ".join(filter(None, layout)) or "none"
            raise RecipeError(f"{where}.parameters.{_SPLITS[split]}: there is no split {name!r}; available: {known}")
        return name
    known_as = [known for known in NAMES[split] if known in layout]
    if known_as or len(layout) == 1:
        return (known_as or list(layout))[0]
    raise RecipeError(
        f"{where}.parameters.{_SPLITS[split]} must name one of the splits {', '.join(layout)}: none is called "
        f"{NAMES[split][0]}"
    )


def _layout(parameters: Mapping[str, Any], split: Split, where: str) -> Layout:
    key = _PATHS[split]
    value = parameters[key]
    paths = [value] if isinstance(value, str) else value
    if not (isinstance(paths, list | tuple) and paths and all(isinstance(path, str) and path for path in paths)):
        raise RecipeError(f"{where}.parameters.{key} must be the path of a file or folder, or a list, got {value!r}")
    config = parameters.get("config", "")
    if not isinstance(config, str):
        raise RecipeError(f"{where}.parameters.config must be the name of a configuration, got {config!r}")
    return layout_of(paths, config=config if split is Split.TRAIN else "", where=f"{where}.parameters.{key}")


@lru_cache(maxsize=_KEPT)
def _indexed(stamped: tuple[tuple[Path, int, int], ...], field_map: FieldMap, by: SplitBy) -> Indexed:
    parts = [read_rows(path, field_map) for path, _, _ in stamped]
    return index_of(parts[0] if len(parts) == 1 else ChainedRows(parts), field_map, by)


def read_rows(path: Path, field_map: FieldMap, head: FirstRows | None = None) -> DataRows:
    """Read the rows of a file, at most `head`. Raises `RecipeError` if the file cannot be read."""
    arrow = path.suffix in (".parquet", ".arrow")
    return ArrowRows.read(path, field_map.fields, head) if arrow else JsonRows.read(path, head)
