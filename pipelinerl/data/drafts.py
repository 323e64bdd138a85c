"""Drafts: problems before it is known which split they belong to, and the hash that decides it.

Promises that the splits are disjoint by construction: a problem belongs to the split that the hash of its text says,
whatever the seed, the domain or the parameters, and however the domain's prompts dress it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pipelinerl.types import Message, Problem


class Split(StrEnum):
    """What a problem is for. `validation` is for choosing settings, `held_out` for reporting; neither is trained on."""

    TRAIN = "train"
    VALIDATION = "validation"
    HELD_OUT = "held_out"


_BUCKETS: Final = 10
_SET_APART: Final = {0: Split.HELD_OUT, 1: Split.VALIDATION}


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A problem before it is known whether it belongs to the split."""

    messages: tuple[Message, ...]
    ground_truth: str
    metadata: Mapping[str, Any]
    tags: tuple[str, ...] = ()


def text_of(messages: Sequence[Message]) -> str:
    """The conversation as one text, by which problems are told apart."""
    return "\x1e".join(f"{message.role}\x1f{message.content}" for message in messages)


def digest_of(text: str) -> bytes:
    """Eight bytes that stand for the text of a problem."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()


def split_of_digest(digest: int) -> Split:
    """80 % train, 10 % validation, 10 % held-out, by the digest as a little-endian number."""
    return _SET_APART.get(digest % _BUCKETS, Split.TRAIN)


def are_of(digests: NDArray[np.uint64], splits: Collection[Split]) -> NDArray[np.bool_]:
    """Which of these digests are of one of these splits, bool [N]."""
    wanted = np.array([split_of_digest(bucket) in splits for bucket in range(_BUCKETS)])
    return wanted[digests % np.uint64(_BUCKETS)]


def split_of(messages: Sequence[Message]) -> Split:
    """The split of the problem with this conversation."""
    return split_of_digest(int.from_bytes(digest_of(text_of(messages)), "little"))


def to_problem(draft: Draft, domain: str, *, name: str = "") -> Problem:
    """The problem with the id that its `name` gives it or, without one, its text."""
    return Problem(
        problem_id=f"{domain}:{name or digest_of(text_of(draft.messages)).hex()}",
        domain=domain,
        messages=draft.messages,
        ground_truth=draft.ground_truth,
        metadata=draft.metadata,
        tags=draft.tags,
    )
