"""Drafts: problems before it is known which split they belong to, and the hash that decides it.

Promises that the splits are disjoint by construction: a problem belongs to the split that the hash of its conversation
says, whatever the seed, the domain or the parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pipelinerl.types import Message, Problem


class Split(StrEnum):
    """What a problem is for. `validation` is for choosing settings, `held_out` for reporting; neither is trained on."""

    TRAIN = "train"
    VALIDATION = "validation"
    HELD_OUT = "held_out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A problem before it is known whether it belongs to the split."""

    messages: tuple[Message, ...]
    ground_truth: str
    metadata: Mapping[str, Any]


def split_of(messages: tuple[Message, ...]) -> Split:
    """80 % train, 10 % validation, 10 % held-out, by the hash of the conversation."""
    text = "\x1e".join(f"{message.role}\x1f{message.content}" for message in messages)
    bucket = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % 10
    return Split.HELD_OUT if bucket == 0 else Split.VALIDATION if bucket == 1 else Split.TRAIN


def to_problem(draft: Draft, domain: str) -> Problem:
    """The problem with an id that depends on its domain and text alone."""
    text = "\x1e".join(f"{message.role}\x1f{message.content}" for message in draft.messages)
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return Problem(
        problem_id=f"{domain}:{digest}",
        domain=domain,
        messages=draft.messages,
        ground_truth=draft.ground_truth,
        metadata=draft.metadata,
    )
