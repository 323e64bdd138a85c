"""One request and its samples while they are being generated.

In a `Sequence`, `token_ids`, `logprobs` and `spans()` always describe the same tokens, and a span names the version of
the weights that really sampled its tokens. Only the positions at which the version changes are stored, so versions cost
nothing per step.

A `TextWindow` holds the growing text of a sample. It never returns a stop string or text after it, even if the string
arrives in parts: text that may begin a stop string is held back until later tokens decide.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, final

from inference_contract.response_format import ResponseFormat
from inference_contract.schemas import AnswerPrefix, FinishReason, Span
from pipelinerl.engines.batching.logit_changes import LogitChange
from trainer_contract.types import Experts

#: (token id, log-prob) of the likeliest tokens of a step, likeliest first.
TopTokens = list[tuple[int, float]]


class Detokenizer(Protocol):
    """Converter of token ids to text, one at a time; holds back incomplete characters."""

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes, possibly empty."""
        ...

    def flush(self) -> str:
        """Return the text that is still held back."""
        ...


@final
class TextWindow:
    """The growing text of one sample.

    Args:
        detokenizer: a fresh detokenizer.
        stops: strings that end the sample; the text is cut before the first stop string in it.
    """

    __slots__ = ("_detokenizer", "_longest_stop", "_shown", "_stopped", "_stops", "text")

    def __init__(self, detokenizer: Detokenizer, stops: tuple[str, ...]) -> None:
        self.text = ""
        self._detokenizer = detokenizer
        self._stops = stops
        self._longest_stop = max((len(stop) for stop in stops), default=0)
        self._shown = 0
        self._stopped = False

    def push(self, token_id: int) -> bool:
        """Append a token's text; return whether it completed a stop string."""
        return self._append(self._detokenizer.push(token_id))

    def close(self) -> None:
        """End the text: the bytes of an incomplete character are shown as they are."""
        if not self._stopped:
            self._append(self._detokenizer.flush())
            self._stopped = True

    def take(self) -> str:
        """Return the text that became final since the last call."""
        end = len(self.text) if self._stopped else len(self.text) - self._held_back()
        new = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return new

    def _append(self, new: str) -> bool:
        if not new:
            return False
        # A stop string may have begun before the new text, but it ends within the new text, so search from shortly
        # before it.
        start = max(0, len(self.text) - self._longest_stop + 1)
        self.text += new
        ends = [at for at in (self.text.find(stop, start) for stop in self._stops) if at >= 0]
        if ends:
            self.text = self.text[: min(ends)]
            self._stopped = True
        return self._stopped

    def _held_back(self) -> int:
        """Return the length of the longest suffix of the text that may begin a stop string."""
        for length in range(min(self._longest_stop - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stops):
                return length
        return 0


@final
@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One of the `n` samples of a request. `noise_key` makes its noise independent of the batch it runs in.

    `prefix` holds the tokens of the answer that another engine has sampled. All other fields describe the tokens
    sampled by this engine, at most `token_limit`. If the request asks for routing, `routed` has one entry per sampled
    token: the experts [layers, top_k] of the token before it. They come from the step that sampled the token, even if a
    later update recomputes the cache. `top` has the likeliest tokens of each step, if the request asks for them.

    `prompt_cache_is_current` is true if the serving weights computed the cache of the prompt, so a sibling may copy it.
    """

    request: Request
    index: int
    noise_key: int
    token_limit: int
    prefix: list[int] = field(default_factory=list)
    text: TextWindow | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    routed: list[Experts] = field(default_factory=list)
    top: list[TopTokens] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    prompt_cache_is_current: bool = True
    _marks: list[tuple[int, int]] = field(default_factory=list)

    def mark_version(self, version: int) -> None:
        """Record that `version` samples from the next token on. Recording the current version again is a no-op."""
        if not self._marks or self._marks[-1][0] != version:
            self._marks.append((version, len(self.token_ids)))

    def spans(self, start: int = 0, end: int | None = None) -> list[Span]:
        """Return (model_version, num_tokens) runs of the tokens [start, end), by default of all tokens.

        The counts add up to the number of tokens. Versions of existing tokens never change, so any thread may call
        this.
        """
        upto = len(self.token_ids) if end is None else end
        marks = list(self._marks)
        nexts = [at for _, at in marks[1:]] + [upto]
        counted = (
            (version, min(following, upto) - max(at, start))
            for (version, at), following in zip(marks, nexts, strict=True)
        )
        return [(version, count) for version, count in counted if count > 0]

    def certain(self) -> tuple[FinishReason | None, int]:
        """Return the finish reason, if any, and the number of tokens that any thread may read with their log-probs.

        The count leaves out the last token of a running sample: it may end the sample, and is then reported with the
        finish reason.
        """
        reason = self.finish_reason  # read the finish reason first: once it is set, no token is added
        return reason, max(len(self.logprobs) - (reason is None), 0)

    @property
    def context(self) -> list[int]:
        """All tokens that the next token follows: the prompt, the prefix, and the sampled tokens."""
        return self.request.prompt_token_ids + self.prefix + self.token_ids

    @property
    def newest_version(self) -> int:
        """The newest version that sampled any token; without tokens, the version that was current when the sample
        ended.
        """
        return self._marks[-1][0] if self._marks else 0

    def version_of(self, position: int) -> int:
        """Return the version of the weights that sampled token `position`."""
        return next(version for version, start in reversed(self._marks) if start <= position)


@final
@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One chat completion in progress: a prompt that its samples share.

    `token_limit` is the most tokens of a choice, already cut to the context length; `stop_ids` are the tokens that end
    a choice earlier. `epoch` is the epoch of the weights with which the request began. `unfinished` counts samples
    without a finish reason. Waiting requests with the lowest `priority` begin first. If `tells_routing`,
    `prompt_routed` [tokens - 1, layers, top_k] is the routing of the prompt when it was first computed. If
    `scores_prompt`, `prompt_logprobs` [tokens] are those of the weights with which the request began.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_limit: int
    temperature: float
    top_p: float
    top_k: int
    streams: bool
    stop_ids: frozenset[int]
    priority: int = 0
    sequences: list[Sequence] = field(default_factory=list)
    started: int = 0
    unfinished: int = 0
    epoch: int = 0
    min_p: float = 0.0
    num_top: int = 0
    change: LogitChange | None = None
    response_format: ResponseFormat | None = None
    tells_routing: bool = False
    prompt_routed: Experts | None = None
    scores_prompt: bool = False
    prompt_logprobs: list[float] | None = None

    def add_sequence(
        self, noise_key: int, text: TextWindow | None = None, *, prefix: AnswerPrefix | None = None
    ) -> None:
        """Add the request's next sample; `prefix` holds its first tokens if another engine has already sampled some."""
        if prefix is None:
            prefix = AnswerPrefix(index=len(self.sequences), token_ids=[])
        self.sequences.append(
            Sequence(
                request=self,
                index=prefix.index,
                noise_key=noise_key,
                token_limit=self.token_limit - len(prefix.token_ids),
                prefix=prefix.token_ids,
                text=text,
            )
        )
        self.unfinished += 1

    @property
    def shares_prompt(self) -> bool:
        """True if all samples follow the same tokens."""
        return not any(sequence.prefix for sequence in self.sequences)

    @property
    def num_sampled_tokens(self) -> int:
        """The number of tokens sampled so far, over all choices."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)


def extend(running: list[Sequence], token_ids: list[int], logprobs: list[float]) -> list[int]:
    """Append one step's tokens; set the finish reason of samples that ended, and return their rows, ascending.

    The end-of-turn token that stops a choice is kept: it was sampled, so it is trained on. This runs once per token of
    the engine, which is why it is one plain loop.
    """
    ended = []
    for row, sequence in enumerate(running):
        token_id = token_ids[row]
        sampled = sequence.token_ids
        sampled.append(token_id)
        sequence.logprobs.append(logprobs[row])
        if token_id in sequence.request.stop_ids or (sequence.text is not None and sequence.text.push(token_id)):
            sequence.finish_reason = FinishReason.STOP
        elif len(sampled) >= sequence.token_limit:
            sequence.finish_reason = FinishReason.LENGTH
        else:
            continue
        ended.append(row)
    return ended
