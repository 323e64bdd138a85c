"""Reads the sample log of a run, live, finished or crashed, and chooses from it.

A step that was taken twice, since the run was resumed, counts as it was taken last. Lines that are torn are skipped,
and a file that the writer removes meanwhile is none.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from operator import itemgetter
from pathlib import Path
from typing import Final, NamedTuple, final

from pipelinerl.observability.samples.record import AnswerRecord, SampleGroup, SampleKind, decode

FOLDER: Final = "samples"
#: What an engine calls an answer that ended for want of tokens.
LENGTH: Final = "length"


class Ranking(StrEnum):
    """Which samples come first where not all are shown."""

    NEWEST = "newest"
    WORST = "worst"
    """The lowest reward."""
    BEST = "best"
    """The highest reward. What was not judged is neither best nor worst."""


class ChosenSample(NamedTuple):
    """An answer, and the group that it is of."""

    group: SampleGroup
    answer: AnswerRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleQuery:
    """Which samples are wanted; None stands for any. `limit` bounds how many answers."""

    kinds: frozenset[SampleKind] = frozenset((SampleKind.TRAINED,))
    step: int | None = None
    domain: str | None = None
    tag: str | None = None
    evaluation: str | None = None
    finish_reason: str | None = None
    ranking: Ranking = Ranking.NEWEST
    limit: int | None = None

    def choose(self, groups: Iterable[SampleGroup]) -> list[ChosenSample]:
        """The samples; ranked ones as ranked, others in the order in which they were written."""
        found = [
            ChosenSample(group, answer)
            for group in groups
            if self._wants(group)
            for answer in group.answers
            if self.finish_reason in (None, answer.finish_reason)
        ]
        if self.ranking is Ranking.NEWEST:
            return found if self.limit is None else found[len(found) - min(self.limit, len(found)) :]
        sign = 1 if self.ranking is Ranking.WORST else -1
        judged = [
            (sign * each.answer.reward, -each.group.step, each) for each in found if each.answer.reward is not None
        ]
        return [each for _, _, each in sorted(judged, key=itemgetter(0, 1))][: self.limit]

    def _wants(self, group: SampleGroup) -> bool:
        return (
            group.kind in self.kinds
            and self.step in (None, group.step)
            and self.domain in (None, group.domain)
            and self.evaluation in (None, group.evaluation)
            and (self.tag is None or self.tag in group.tags)
        )


@final
@dataclass(slots=True)
class SampleReader:
    """Reads the files of a run's samples on from where it was; one may look again and again while they grow."""

    run_dir: Path
    _offsets: dict[str, int] = field(default_factory=dict)

    def new(self) -> list[SampleGroup]:
        """Groups that were written since the last call, by time."""
        groups = [group for path in sorted(sample_files(self.run_dir)) for group in self._rest_of(path)]
        return sorted(groups, key=lambda group: group.time)

    def _rest_of(self, path: Path) -> Iterator[SampleGroup]:
        offset = self._offsets.get(path.name, 0)
        try:
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data.rfind(b"\n") + 1
        self._offsets[path.name] = offset + whole
        for line in data[:whole].split(b"\n")[:-1]:
            group = decode(line)
            if group is not None:
                yield group


def sample_files(run_dir: Path) -> list[Path]:
    """The files of a run's sample log; of each kind of samples the newest comes last."""
    try:
        names = os.listdir(run_dir / FOLDER)  # whoever follows a run asks again and again: `glob` takes five times this
    except OSError:
        return []
    kept = [name for name in names if name.endswith(".jsonl")]
    return [run_dir / FOLDER / name for name in sorted(kept, key=lambda name: (name[:-6].rpartition("-")[2], name))]


def read_samples(run_dir: Path) -> list[SampleGroup]:
    """All groups that the log still has, by time; of a step that was taken twice, those of the last time."""
    latest = {(group.kind, group.step, group.group_id): group for group in SampleReader(run_dir).new()}
    return sorted(latest.values(), key=lambda group: group.time)
