"""Reader of a run's sample log, whether the run is live, finished or crashed, and selection of samples.

If a step was repeated because the run was resumed, only the samples of the last repetition count. Incomplete lines are
skipped, and files that the writer removes during a read are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from operator import itemgetter
from pathlib import Path
from typing import Final, NamedTuple

from pipelinerl.observability.samples.record import AnswerRecord, SampleGroup, SampleKind, decode

FOLDER: Final = "samples"
#: The finish reason of an answer that hit the token limit.
LENGTH: Final = "length"


class Ranking(StrEnum):
    """The order in which samples are selected if their number is limited."""

    NEWEST = "newest"
    WORST = "worst"
    """Lowest reward first."""
    BEST = "best"
    """Highest reward first. Unjudged answers are neither best nor worst."""


class ChosenSample(NamedTuple):
    """An answer and its group."""

    group: SampleGroup
    answer: AnswerRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleQuery:
    """Criteria that samples must match; a criterion of None matches any. `limit` bounds the number of answers."""

    kinds: frozenset[SampleKind] = frozenset((SampleKind.TRAINED,))
    step: int | None = None
    domain: str | None = None
    tag: str | None = None
    evaluation: str | None = None
    finish_reason: str | None = None
    ranking: Ranking = Ranking.NEWEST
    limit: int | None = None

    def choose(self, groups: Iterable[SampleGroup]) -> list[ChosenSample]:
        """Return the last `limit` matching samples as given or, for BEST and WORST, the first judged ones by reward."""
        matching = [
            ChosenSample(group, answer)
            for group in groups
            if group.kind in self.kinds
            and self.step in (None, group.step)
            and self.domain in (None, group.domain)
            and self.evaluation in (None, group.evaluation)
            and (self.tag is None or self.tag in group.tags)
            for answer in group.answers
            if self.finish_reason in (None, answer.finish_reason)
        ]
        if self.ranking is Ranking.NEWEST:
            return matching if self.limit is None else matching[len(matching) - min(self.limit, len(matching)) :]
        sign = 1 if self.ranking is Ranking.WORST else -1
        judged = [
            (sign * each.answer.reward, -each.group.step, each) for each in matching if each.answer.reward is not None
        ]
        return [each for _, _, each in sorted(judged, key=itemgetter(0, 1))][: self.limit]


class SampleReader:
    """Incremental reader of a run's sample files; each call continues at the last position."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._offsets: dict[str, int] = {}

    def new(self) -> list[SampleGroup]:
        """Return groups written since the last call, sorted by time."""
        groups: list[SampleGroup] = []
        for path in sorted(sample_files(self._run_dir)):
            offset = self._offsets.get(path.name, 0)
            with suppress(FileNotFoundError), path.open("rb") as file:
                file.seek(offset)
                data = file.read()
                whole = data.rfind(b"\n") + 1
                self._offsets[path.name] = offset + whole
                decoded = map(decode, data[:whole].split(b"\n")[:-1])
                groups += [group for group in decoded if group is not None]
        return sorted(groups, key=lambda group: group.time)


def sample_files(run_dir: Path) -> list[Path]:
    """Return the run's sample files, oldest first within each kind."""
    return sorted((run_dir / FOLDER).glob("*.jsonl"), key=lambda path: (path.stem.rpartition("-")[2], path.name))


def read_samples(run_dir: Path) -> list[SampleGroup]:
    """Return all groups in the log's files, sorted by time; of a repeated step, only the last samples."""
    latest = {(group.kind, group.step, group.group_id): group for group in SampleReader(run_dir).new()}
    return sorted(latest.values(), key=lambda group: group.time)
