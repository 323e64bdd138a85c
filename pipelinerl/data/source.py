"""`ProblemSource`, the interface of a source, and `Draft`, a problem before its split is known.

A source is a pure function of (seed, split, i): it does not depend on the order of calls, and uses no network. Splits
are disjoint by construction, because only the hash of a problem's text decides its split.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from pipelinerl import rng
from pipelinerl.data.prompts import NO_PROMPTS, Prompts
from pipelinerl.errors import RecipeError
from pipelinerl.types import Message, Problem


class ProblemSource(Protocol):
    """An endless (training) or finite (validation, held-out) sequence of problems."""

    def problem(self, index: int) -> Problem:
        """Return problem `index` ≥ 0. Raises `RecipeError` past the end of a finite source."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRequest:
    """Arguments to open a source; `argument` is the text after its name's colon, `seed` orders its problems."""

    argument: str = ""
    domain: str
    split: Split
    seed: int
    parameters: Mapping[str, Any] = field(default_factory=dict)
    prompts: Prompts = NO_PROMPTS

    @property
    def where(self) -> str:
        return f"domains.{self.domain}"


class Split(StrEnum):
    """Purpose of a problem: training, choosing settings (`validation`), or reporting (`held_out`)."""

    TRAIN = "train"
    VALIDATION = "validation"
    HELD_OUT = "held_out"


_BUCKETS: Final = 10
_SET_APART: Final = {0: Split.HELD_OUT, 1: Split.VALIDATION}


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A problem before its split is known."""

    messages: tuple[Message, ...]
    ground_truth: str
    metadata: Mapping[str, Any]
    tags: tuple[str, ...] = ()


def text_of(messages: Sequence[Message]) -> str:
    """Join the messages to one text, which identifies the problem."""
    return "\x1e".join(f"{message.role}\x1f{message.content}" for message in messages)


def digest_of(text: str) -> bytes:
    """Return an eight-byte digest of a problem's text."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()


def split_of_digest(digest: int) -> Split:
    """Return a problem's split, decided by its digest as a little-endian number: 80 % train, 10 % in each other."""
    return _SET_APART.get(digest % _BUCKETS, Split.TRAIN)


def are_of(digests: NDArray[np.uint64], splits: Collection[Split]) -> NDArray[np.bool_]:
    """Return the mask, bool [N], of the digests that belong to one of `splits`."""
    wanted = np.array([split_of_digest(bucket) in splits for bucket in range(_BUCKETS)])
    return wanted[digests % np.uint64(_BUCKETS)]


def split_of_text(text: str) -> Split:
    """Return the split of the problem that this text identifies."""
    return split_of_digest(int.from_bytes(digest_of(text), "little"))


def split_of(messages: Sequence[Message]) -> Split:
    """Return the split of the problem with this conversation."""
    return split_of_text(text_of(messages))


class ShuffledEpochs:
    """Order of a split's items [M], reshuffled in every epoch. Validation and held-out splits end after one epoch.

    `name` is part of the seed of the shuffles. `what` (a plural noun for the items) and `remedy` are used in the error
    message for an index past that end.
    """

    def __init__(self, items: NDArray[np.int64], request: SourceRequest, *, name: str, what: str, remedy: str) -> None:
        self._items = items
        self._request = request
        self._name = name
        self._what = what
        self._remedy = remedy
        self._order: tuple[int, NDArray[np.int64]] = (-1, items)  # number of the latest epoch, and its order of items

    def __len__(self) -> int:
        return len(self._items)

    def item(self, index: int) -> int:
        """Return the item at `index`, counted over all epochs. Raises `RecipeError` past the end of a single epoch."""
        request, (epoch, place) = self._request, divmod(index, len(self._items))
        if epoch and request.split is not Split.TRAIN:
            raise RecipeError(
                f"{request.where}: the {request.split} split holds {len(self._items)} {self._what}; lower "
                f"evaluation.problems, or {self._remedy}"
            )
        if self._order[0] != epoch:
            noise = rng.generator(request.seed, self._name, request.split, epoch)
            self._order = (epoch, noise.permutation(self._items))
        return int(self._order[1][place])


def to_problem(draft: Draft, domain: str, *, name: str = "") -> Problem:
    """Build a problem with the id `domain:name`; if `name` is empty, the digest of the problem's text replaces it."""
    return Problem(
        problem_id=f"{domain}:{name or digest_of(text_of(draft.messages)).hex()}",
        domain=domain,
        messages=draft.messages,
        ground_truth=draft.ground_truth,
        metadata=draft.metadata,
        tags=draft.tags,
    )
