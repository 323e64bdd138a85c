"""`SampleIndex`: maps a run's samples to their places in files, with columns to sort and filter; in bounded memory.

Texts and tokens stay in the files and are read on demand. The newest file is indexed first. A group's permanent name is
a digest of its kind, step, evaluation set and id, so a link to it also works in a copy of the run. When a step is
repeated, its new samples replace the earlier ones; samples whose file was removed disappear from the index.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from pipelinerl.observability.samples import SampleGroup, SampleKind, decode, sample_files

Bool = NDArray[np.bool_]

#: Maximum number of indexed samples: 100 MB at about 48 bytes each.
MOST_SAMPLES: Final = 2**21
_PIECE_BYTES: Final = 2**20
_MOST_LINE: Final = 2**25
#: Maximum number of distinct names (domains, tags, reasons) in the index.
_MOST_NAMES: Final = 2**16
_LARGEST: Final = 2**31 - 1
_UNKNOWN: Final = -(2**31)


class _AnswerPart(msgspec.Struct):
    outcome: str = ""
    reward: float | None = None
    advantage: float | None = None
    length: int = 0
    staleness: int | None = None
    finish_reason: str = ""


class _GroupPart(msgspec.Struct):
    """Those fields of a group's JSON line that are indexed; the decoder skips all other fields, such as texts."""

    kind: SampleKind
    step: int
    time: float
    group_id: str
    domain: str
    answers: list[_AnswerPart]
    tags: tuple[str, ...] = ()
    evaluation: str = ""


_PARTS: Final = msgspec.json.Decoder(_GroupPart)

_GROUP: Final = np.dtype(
    [("key", "u8"), ("step", "i8"), ("time", "f8"), ("offset", "i8"), ("size", "i4"), ("file", "i4"), ("kind", "i4"),
     ("domain", "i4"), ("tags", "i4"), ("evaluation", "i4"), ("signal", "?"), ("there", "?")]
)  # fmt: skip
_SAMPLE: Final = np.dtype(
    [("group", "i4"), ("number", "i4"), ("reward", "f8"), ("advantage", "f4"), ("length", "i4"), ("staleness", "i4"),
     ("finish", "i4"), ("outcome", "i4")]
)  # fmt: skip


class _Rows:
    def __init__(self, kind: np.dtype[Any]) -> None:
        self._array = np.zeros(256, kind)
        self.count = 0

    @property
    def all(self) -> NDArray[Any]:
        return self._array[: self.count]

    def add(self, rows: Sequence[tuple[Any, ...]]) -> None:
        if self.count + len(rows) > len(self._array):
            grown = np.zeros(max(2 * len(self._array), self.count + len(rows)), self._array.dtype)
            grown[: self.count] = self.all
            self._array = grown
        self._array[self.count : self.count + len(rows)] = rows
        self.count += len(rows)

    def keep(self, kept: NDArray[Any]) -> None:
        self._array, self.count = kept.copy(), len(kept)


class _Names:
    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self.names: list[Any] = []

    def number(self, name: Any) -> int:
        """Return the number of a name. A new name gets the next number, or -1 once there are `_MOST_NAMES` names."""
        number = self._numbers.get(name)
        if number is None:
            if len(self.names) >= _MOST_NAMES:
                return -1
            number = self._numbers[name] = len(self.names)
            self.names.append(name)
        return number

    def known(self, name: Any) -> int:
        """Return the number of a name; -2, which matches no entry, if the name is unknown."""
        return self._numbers.get(name, -2)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFilter:
    """Criteria that samples must match, and their order; a criterion of None matches any sample."""

    kind: SampleKind | None = None
    domain: str | None = None
    tag: str | None = None
    step: int | None = None
    step_to: int | None = None
    evaluation: str | None = None
    finish_reason: str | None = None
    outcome: str | None = None
    signal: bool | None = None
    sort: str = "time"
    descending: bool = True
    limit: int = 50
    after: tuple[float, int, int] | None = None
    """Last sample on the previous page: its value in the order `sort`, its group's key, and its number."""


@dataclass(frozen=True, slots=True)
class SamplePlace:
    """One sample: its group's key (a digest), its number in the group, and True if the group's rewards differ."""

    key: int
    number: int
    signal: bool

    @property
    def name(self) -> str:
        """The group's permanent name, as used in links."""
        return f"{self.key:016x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleChoice:
    """One page of `matched` samples; `after` is `SampleFilter.after` for the next page, or None if this is the last."""

    matched: int
    places: list[SamplePlace]
    after: tuple[float, int, int] | None


@dataclass(slots=True)
class SampleIndex:
    """Index of the samples in one run's directory."""

    run_dir: Path
    most: int = MOST_SAMPLES
    left_out: int = 0
    """Number of samples in the log that are too old to be indexed."""
    unread_bytes: int = 0
    total_bytes: int = 0
    _groups: _Rows = field(default_factory=lambda: _Rows(_GROUP))
    _samples: _Rows = field(default_factory=lambda: _Rows(_SAMPLE))
    _by_key: dict[int, int] = field(default_factory=dict)
    _files: _Names = field(default_factory=_Names)
    _offsets: dict[str, tuple[int, int]] = field(default_factory=dict)
    _domains: _Names = field(default_factory=_Names)
    _tags: _Names = field(default_factory=_Names)
    _reasons: _Names = field(default_factory=_Names)

    @property
    def share(self) -> float:
        return 1.0 - self.unread_bytes / self.total_bytes if self.total_bytes else 1.0

    @property
    def count(self) -> int:
        return int(self._groups.all["there"][self._samples.all["group"]].sum())

    @property
    def names(self) -> dict[str, list[str]]:
        kinds = np.unique(self._groups.all["kind"]).tolist()
        return {
            "domains": sorted(self._domains.names),
            "tags": sorted({tag for tags in self._tags.names for tag in tags})[:1000],
            "kinds": [str(_KINDS[number]) for number in kinds],
        }

    def read(self) -> int:
        """Index about 1 MiB of new data, newest file first; return the number of new samples. Raises OSError."""
        self.unread_bytes = self.total_bytes = count = 0
        there = set()
        for path in reversed(sample_files(self.run_dir)):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            there.add(path.name)
            inode, offset = self._offsets.get(path.name, (status.st_ino, 0))
            if inode != status.st_ino or status.st_size < offset:
                self._forget(path.name)
                offset = 0
            size = status.st_size
            if size > offset and not count:
                offset, count, torn = self._read_piece(path, offset, size)
                size -= torn
            self._offsets[path.name] = (status.st_ino, offset)
            self.total_bytes += size
            self.unread_bytes += max(0, size - offset)
        for name in self._offsets.keys() - there:
            self._forget(name)
            del self._offsets[name]
        self._make_room()
        return count

    def choose(self, wanted: SampleFilter) -> SampleChoice:
        """Return a page of the matching samples in the wanted order; samples without a value to sort by come last."""
        groups, samples = self._groups.all, self._samples.all
        rows = np.flatnonzero(self._fitting(wanted, groups, samples))
        owners = samples["group"][rows]
        of_group = wanted.sort in ("time", "step")
        values = (groups[wanted.sort][owners] if of_group else samples[wanted.sort][rows]).astype(np.float64)
        unknown = np.isnan(values) | (values == _UNKNOWN)
        values = np.where(unknown, np.inf, -values if wanted.descending else values)
        matched = len(rows)
        if wanted.after is not None:
            value, key, number = wanted.after
            keys, numbers, named = groups["key"][owners], samples["number"][rows], np.uint64(key)
            same = (values == value) & ((keys > named) | ((keys == named) & (numbers > number)))
            behind = (values > value) | same
            rows, owners, values = rows[behind], owners[behind], values[behind]
        more = len(rows) > wanted.limit
        if more:
            least = np.partition(values, wanted.limit - 1)[wanted.limit - 1]
            near = np.flatnonzero(values <= least)
            rows, owners, values = rows[near], owners[near], values[near]
        order = np.lexsort((samples["number"][rows], groups["key"][owners], values))[: wanted.limit]
        places = [
            SamplePlace(int(groups["key"][group]), int(samples["number"][row]), bool(groups["signal"][group]))
            for row, group in zip(rows[order].tolist(), owners[order].tolist(), strict=True)
        ]
        after = (float(values[order[-1]]), places[-1].key, places[-1].number) if more else None
        return SampleChoice(matched=matched, places=places, after=after)

    def group(self, name: str) -> SampleGroup | None:
        """Read the group with a permanent name from its file; None if the log does not, or no longer, contain it."""
        try:
            place = self._by_key.get(int(name, 16)) if len(name) == 16 else None
        except ValueError:
            place = None
        if place is None or not self._groups.all["there"][place]:
            return None
        row = self._groups.all[place]
        path = self.run_dir / "samples" / self._files.names[int(row["file"])]
        try:
            with path.open("rb") as file:
                file.seek(int(row["offset"]))
                stored = decode(file.read(int(row["size"])))
        except FileNotFoundError:
            return None
        return stored if stored is not None and _key(stored) == int(row["key"]) else None

    def has_signal(self, name: str) -> bool:
        place = self._by_key.get(int(name, 16))
        return place is not None and bool(self._groups.all["signal"][place])

    def _fitting(self, wanted: SampleFilter, groups: NDArray[Any], samples: NDArray[Any]) -> Bool:
        fits, suits = groups["there"].copy(), np.ones(len(samples), bool)
        of_groups: dict[str, tuple[Any, Callable[[Any], int]]] = {
            "kind": (wanted.kind, _KINDS.index),
            "domain": (wanted.domain, self._domains.known),
            "evaluation": (wanted.evaluation, self._reasons.known),
            "signal": (wanted.signal, int),
        }
        for column, (value, number) in of_groups.items():
            if value is not None:
                fits &= groups[column] == number(value)
        if wanted.tag is not None:
            fits &= np.isin(groups["tags"], [at for at, tags in enumerate(self._tags.names) if wanted.tag in tags])
        last = wanted.step if wanted.step_to is None else wanted.step_to
        if wanted.step is not None:
            fits &= groups["step"] >= wanted.step
        if last is not None:
            fits &= groups["step"] <= last
        for column, reason in {"finish": wanted.finish_reason, "outcome": wanted.outcome}.items():
            if reason is not None:
                suits &= samples[column] == self._reasons.known(reason)
        matching: Bool = fits[samples["group"]] & suits
        return matching

    def _read_piece(self, path: Path, offset: int, size: int) -> tuple[int, int, int]:
        """Index a piece of a file; return the next offset, the number of new samples, and an incomplete line's size."""
        piece, data = _PIECE_BYTES, b""
        with path.open("rb") as file:
            while piece <= _MOST_LINE:
                file.seek(offset)
                data = file.read(piece)
                if b"\n" in data or offset + len(data) >= size:
                    break
                piece *= 4
        whole = data.rfind(b"\n") + 1
        count, at, number = 0, offset, self._files.number(path.name)
        for line in data[:whole].split(b"\n")[:-1]:
            count += self._add(line, number, at)
            at += len(line) + 1
        if not whole and piece > _MOST_LINE:  # no sample has a line this long: skip the rest of the file
            return size, 0, 0
        rest = len(data) - whole
        return at, count, rest if offset + len(data) >= size else 0

    def _add(self, line: bytes, file: int, offset: int) -> int:
        try:
            group = _PARTS.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return 0
        key = _key(group)
        place = self._by_key.get(key)
        if place is not None:
            if self._groups.all["there"][place] and self._groups.all["time"][place] > group.time:
                return 0
            self._groups.all["there"][place] = False
        rewards = {answer.reward for answer in group.answers if answer.reward is not None}
        domain = self._domains.number(group.domain)
        tags, evaluation = self._tags.number(group.tags), self._reasons.number(group.evaluation)
        self._by_key[key] = self._groups.count
        row = (key, _whole(group.step), group.time, offset, len(line) + 1, file, _KINDS.index(group.kind), domain, tags,
               evaluation, len(rewards) > 1, True)  # fmt: skip
        number = self._groups.count
        self._groups.add([row])
        self._samples.add(
            [
                (
                    number, at, _value(answer.reward), _value(answer.advantage), _whole(answer.length),
                    _UNKNOWN if answer.staleness is None else _whole(answer.staleness),
                    self._reasons.number(answer.finish_reason), self._reasons.number(answer.outcome),
                )
                for at, answer in enumerate(group.answers)
            ]
        )  # fmt: skip
        return len(group.answers)

    def _forget(self, file: str) -> None:
        groups = self._groups.all
        groups["there"] &= groups["file"] != self._files.known(file)

    def _make_room(self) -> None:
        """Drop the oldest samples beyond the limit, and groups that were removed or replaced.

        To save time, do this only if there are twice as many samples as the limit, or if more than half of the groups
        (of which there are over 4096) have been removed or replaced.
        """
        samples, groups = self._samples.all, self._groups.all
        gone = len(groups) > 4096 and int(groups["there"].sum()) < len(groups) // 2
        if len(samples) < 2 * self.most and not gone:
            return
        sizes = np.bincount(samples["group"], minlength=len(groups)) * groups["there"]
        newest = np.argsort(-groups["time"], kind="stable")
        stays = np.zeros(len(groups), bool)
        stays[newest[np.cumsum(sizes[newest]) <= self.most]] = True
        stays &= groups["there"]
        self.left_out += int(sizes[~stays].sum())
        numbers = np.cumsum(stays) - 1
        kept = samples[stays[samples["group"]]].copy()
        kept["group"] = numbers[kept["group"]]
        self._samples.keep(kept)
        self._groups.keep(groups[stays])
        self._by_key = {int(key): place for place, key in enumerate(self._groups.all["key"].tolist())}


_KINDS: Final = tuple(SampleKind)


def _key(group: SampleGroup | _GroupPart) -> int:
    identity = f"{group.kind}\x1f{group.step}\x1f{group.evaluation}\x1f{group.group_id}"
    return int.from_bytes(hashlib.blake2b(identity.encode(errors="replace"), digest_size=8).digest(), "big")


def _value(number: float | None) -> float:
    return float("nan") if number is None or not -1e30 < number < 1e30 else number


def _whole(number: int) -> int:
    return max(-_LARGEST, min(_LARGEST, number))


def answers_of(choice: SampleChoice, index: SampleIndex) -> Iterator[tuple[SamplePlace, SampleGroup]]:
    """Yield the chosen samples with their groups, reading each group once; leave out groups that were removed."""
    held: dict[str, SampleGroup | None] = {}
    for place in choice.places:
        if place.name not in held:
            held[place.name] = index.group(place.name)
        group = held[place.name]
        if group is not None and place.number < len(group.answers):
            yield place, group
