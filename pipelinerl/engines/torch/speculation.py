"""Speculative decoding by prompt lookup: one forward pass computes several tokens of a row.

A row's draft repeats the tokens that followed the latest earlier occurrence of the row's last tokens (prompt lookup
decoding). A step feeds a row's next token and its draft as if they were rows of their own that share the row's blocks,
each at its own position. Every one of them samples with the parameters of its row and the noise of its position. The
samples hold up to the first that differs from the draft.

So the tokens are those that decoding one by one samples. In terms of rejection sampling (Leviathan et al. 2023,
2211.17192) with a draft that proposes token d with certainty: d is accepted with its probability p(d), and after a
rejection the token has the distribution p without d. The cache entries of rejected tokens are overwritten by the next
step, and no row attends beyond its position. States of recurrent layers cannot be taken back in this way, so models
that have them are rejected.

Drafts adapt to each row. The first has one token; each that is accepted doubles the length of the next, and each that
is rejected halves it. Drafts of one token need a longer occurrence, which keeps free text from paying for guesses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pipelinerl.errors import RecipeError

OPTION: Final = "speculate"
#: The most tokens of a draft; a draft must not need more than one further block.
MOST: Final = 16
#: How many of a row's last tokens must occur earlier for a draft: at least `_SHORTEST`, and `_SURE` for a draft of one
#: token. Up to `_LONGEST` are compared, and a draft follows the latest of the longest occurrences.
_SHORTEST: Final = 2
_SURE: Final = 3
_LONGEST: Final = 5


def length_of(options: Mapping[str, Any]) -> int:
    """Return the most tokens of a draft, 0 for none, from `engine.options`. Raises `RecipeError`."""
    if unknown := sorted(options.keys() - {OPTION}):
        raise RecipeError(f"the torch engine knows only engine.options.{OPTION}, got {unknown[0]}; remove it")
    length = options.get(OPTION, 0)
    if type(length) is not int or not 0 <= length <= MOST:
        raise RecipeError(
            f"engine.options.{OPTION} is the number of tokens that a step drafts, 0 to {MOST}, got {length!r}; set it "
            "to 4, or leave it out"
        )
    return length


@dataclass(frozen=True, slots=True)
class Drafts:
    """The tokens that a step feeds: V in all, row by row, and in each of the B rows in their order.

    Attributes:
        rows: i64 [V], the row of each token, ascending.
        skipped: i64 [V], 0 for the row's next token, then 1, 2, … for the tokens of its draft.
        feeds: i64 [V], the tokens.
        firsts: i64 [B], the place of each row's next token among the V.
    """

    rows: NDArray[np.int64]
    skipped: NDArray[np.int64]
    feeds: NDArray[np.int64]
    firsts: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each row's draft, i64 [B]."""
        return np.diff(self.firsts, append=len(self.rows)) - 1

    def drafted(self) -> list[list[int]]:
        """Return for each of the V tokens the tokens of its draft up to itself, as penalties count them."""
        feeds = self.feeds.tolist()
        return [feeds[place - depth + 1 : place + 1] for place, depth in enumerate(self.skipped.tolist())]

    def accepted(self, sampled: NDArray[np.int64], logprobs: NDArray[np.float32]) -> NDArray[np.int64]:
        """Return how many tokens of each row's draft were sampled, i64 [B], given what each of the V tokens sampled.

        A token after non-finite logits is not accepted: the next step samples it again, and reports it.
        """
        holds = np.zeros(len(sampled), dtype=bool)
        holds[:-1] = (sampled[:-1] == self.feeds[1:]) & (self.skipped[1:] > 0) & np.isfinite(logprobs[1:])
        ends = np.flatnonzero(~holds)  # each row's last token ends it
        return ends[np.searchsorted(ends, self.firsts)] - self.firsts


class Drafter:
    """Makes the drafts of `rows` rows, of at most `most` tokens each."""

    def __init__(self, rows: int, most: int) -> None:
        self._most = most
        self._lengths: NDArray[np.int64] = np.ones(rows, dtype=np.int64)

    def begin(self, rows: Sequence[int]) -> None:
        """Forget how the drafts of earlier sequences in `rows` fared."""
        self._lengths[list(rows)] = 1

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Move rows `sources` to rows `targets`, pairwise."""
        self._lengths[list(targets)] = self._lengths[list(sources)]

    def drafts(self, tokens: NDArray[np.int32], positions: NDArray[np.int64]) -> Drafts | None:
        """Return drafts of rows 0..B-1, None without any; row b's next token is `tokens[b, positions[b]]`."""
        room = tokens.shape[1] - 1 - positions
        lengths = np.minimum(self._lengths[: len(positions)], room).tolist()
        found = [
            np.append(own[-1:], continuation(own, length, shortest=_SURE if length == 1 else _SHORTEST))
            for row, (position, length) in enumerate(zip(positions.tolist(), lengths, strict=True))
            for own in [tokens[row, : position + 1]]
        ]
        counts = np.array([len(each) for each in found])
        if int(counts.max()) == 1:
            return None
        firsts = np.cumsum(counts) - counts
        rows = np.repeat(np.arange(len(found)), counts)
        return Drafts(rows, np.arange(len(rows)) - firsts[rows], np.concatenate(found).astype(np.int64), firsts)

    def learn(self, drafts: Drafts, accepted: NDArray[np.int64]) -> None:
        """Adapt the length of drafts to how many tokens of each row's last draft were `accepted` [B]."""
        drafted, own = drafts.lengths, self._lengths[: len(accepted)]
        own[(drafted > 0) & (accepted == drafted)] *= 2
        own[(drafted > 0) & (accepted == 0)] //= 2
        np.clip(own, 1, self._most, out=own)


def continuation(tokens: NDArray[np.int32], most: int, *, shortest: int = _SHORTEST) -> NDArray[np.int32]:
    """Return `most` tokens that followed the latest earlier occurrence of the last of `tokens` [T]; none if the last
    `shortest` tokens occur nowhere else. Where the text ends, it is continued as a repetition.
    """
    ends = (tokens[:-1] == tokens[-1]).nonzero()[0]
    matched = min(len(ends), 1)
    while matched and matched < _LONGEST:
        longer = ends[ends >= matched]
        longer = longer[tokens[longer - matched] == tokens[-1 - matched]] if matched < len(tokens) else longer[:0]
        if not len(longer):
            break
        ends, matched = longer, matched + 1
    return np.resize(tokens[int(ends[-1]) + 1 :], most) if matched >= shortest else tokens[:0]
