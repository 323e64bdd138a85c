"""Check that an engine computes the trainer's log-probs with the weights that were published to it.

The engine answers a fixed prompt, the canary, and returns tokens with log-probs. The trainer computes its own log-probs
of the same tokens; its weights do not change during the check. Only log-probs are compared, so engines may sample
different tokens. A digest only proves that the bytes arrived, not that they are loaded under the right names or
quantised correctly.

Then the engine answers longer prompts, made of the tokens of its answers, up to the run's context: positional
embeddings, windows and caches may be wrong at some lengths only.

An engine that joins is checked so. After each later update, a brief check repeats the first prompt with few tokens: an
update may go wrong in a way that no digest of the bytes shows. `training/engine_proofs.py` tests the tokens of a brief
check against those of earlier checks, so that it also finds faults far below the tolerance. Of hundreds of engines,
`_AT_ONCE` answer at once. Engines that give the same answer share the trainer's computation of it.

| waits for | unblocked by | at the latest |
|---|---|---|
| the canary's answer | the engine, which may have a queue | its grace (`weights/grace.py`), at most `deadline_s` |
| the trainer's log-probs | the current step, on the trainer's thread | – |
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain, cycle, islice
from typing import Final, Protocol

import numpy as np

from inference_contract.errors import ContractError, Overloaded, Persistence
from inference_contract.schemas import ChatCompletion, ChatCompletionRequest, ChatMessage, Choice, ModelList
from pipelinerl.enums import RoutingReplay
from pipelinerl.errors import EngineUnreachable
from pipelinerl.numerics.routed_experts import of_context, off_the_wire
from pipelinerl.training.packing import alone
from pipelinerl.types import Outcome, Priority, Rollout, Turn, Verdict, VersionSpan
from pipelinerl.weights.grace import Grace
from pipelinerl.weights.publisher import PublishReport
from trainer_contract.errors import BatchError, NonFiniteError
from trainer_contract.types import Float32, MicroBatch


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The allowed difference of engine's and trainer's log-probs, in nats: at the worst token, and on average."""

    worst: float = math.inf
    mean: float = math.inf

    def __str__(self) -> str:
        worst = [f"{self.worst:g} nats"] if math.isfinite(self.worst) else []
        mean = [f"{self.mean:g} nats on average"] if math.isfinite(self.mean) else []
        return " and ".join(worst + mean) or "any number of nats"


#: Tolerances by the precision of the engine's weights or arithmetic. Two float32 implementations of one decoder differ
#: by rounding: 1e-5 at most for a small Llama, but 4e-4 at rare tokens of Qwen3.5, whose two implementations in
#: transformers differ as much, and more where a model is very sure. For coarser weights, only the mean difference is
#: bounded: with int8 weights, `bench tis` measured a mean of 0.02 and of 0.08 in the worst step, but single rare tokens
#: differ by up to 7. Wrong weights differ by several nats at most tokens; `training/engine_proofs.py` finds less.
TOLERANCES: Final[Mapping[str, Tolerance]] = {
    "float32": Tolerance(worst=5e-3, mean=1e-4),
    "float16": Tolerance(mean=0.05),
    "bfloat16": Tolerance(mean=0.1),
    "int8": Tolerance(mean=0.3),
    "int4": Tolerance(mean=1.5),
}
#: Tolerance for float32 weights of a mixture of experts. Engine and trainer may choose different ones of two nearly
#: equal experts; this changes single tokens a lot, but the mean little.
ROUTED_APART: Final = Tolerance(mean=0.05)

_PAUSE_S: Final = 0.1
#: The most engines that answer at once.
_AT_ONCE: Final = 128
#: Deadline in seconds of an answer after an update.
_BRIEF_S: Final = 5.0


class Depth(Enum):
    """The depth of a check: the most answers to the first prompt, and the most tokens of each."""

    BRIEF = (1, 8)
    """After each update: a few tokens, which show a fault of all tokens at once, and others in time."""
    CLOSE = (8, 16)
    """After an update, if the tokens of a brief check are unlikely, or the samples are to be tested, too."""
    JOINING = (64, 64)
    """All answers of the canary, and longer prompts."""


#: Function that returns the trainer's log-probs [T] of a micro-batch.
Forward = Callable[[MicroBatch], Awaitable[Float32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """The prompt that an engine must answer, at the run's `temperature`, and the tolerance for its log-probs. The
    longest prompt and its answer fill `context_length`. With `routing_replay` the trainer uses the experts that the
    engine chose, so that near ties between experts cause no difference.
    """

    messages: tuple[ChatMessage, ...]
    tolerance: Tolerance
    context_length: int
    samples: int = 8
    tokens: int = 32
    deadline_s: float = 60.0
    temperature: float = 1.0
    routing_replay: RoutingReplay = RoutingReplay.OFF

    def at(self, depth: Depth) -> Canary:
        """Return the canary of a check. After an update it has few tokens, whose mean difference is not bounded, as
        rare tokens differ by several nats with int8 weights.
        """
        if depth is Depth.JOINING:
            return self
        return replace(
            self,
            samples=min(depth.value[0], self.samples),
            tokens=min(depth.value[1], self.tokens),
            deadline_s=min(_BRIEF_S, self.deadline_s),
            tolerance=Tolerance(worst=self.tolerance.worst),
        )

    def request(self, version: int, prompt: list[int] | None = None) -> ChatCompletionRequest:
        """Return the request, with the version as seed: for answers to the messages, or for one to `prompt`."""
        return ChatCompletionRequest(
            messages=list(self.messages) if prompt is None else None,
            prompt_token_ids=prompt,
            n=self.samples if prompt is None else 1,
            max_tokens=self.tokens,
            temperature=self.temperature,
            seed=version,
            return_token_ids=True,
            return_routed_experts=self.routing_replay is RoutingReplay.ROLLOUT,
            priority=Priority.PROOF,
        )

    def longer_prompts(self, completion: ChatCompletion, context: int) -> Iterator[list[int]]:
        """Yield prompts that fill a quarter, half and all of a context, made of the tokens of a valid answer."""
        prompt = completion.prompt_token_ids or []
        tokens = [*prompt, *chain.from_iterable(choice.token_ids or () for choice in completion.choices)]
        longest = context - self.tokens
        for length in sorted({context // 4, context // 2, longest}):
            if len(prompt) < length <= longest:
                yield list(islice(cycle(tokens), length))


@dataclass(frozen=True, slots=True)
class Compared:
    """An engine's answers to canary requests, and the log-probs of their N tokens by engine and trainer, f32 [N]."""

    rollouts: tuple[Rollout, ...]
    theirs: Float32
    ours: Float32


@dataclass(frozen=True, slots=True)
class CanaryFindings:
    """Results by engine URL; each engine is in `worst`, `mismatched` or `failed`.

    `worst` has the largest difference in nats of engines that passed, `mismatched` the reasons of engines that did not,
    `failed` the errors of engines that gave no answer. `permanent` has the failed engines that would fail again.
    `compared` has the answers of engines that gave valid ones.
    """

    worst: dict[str, float] = field(default_factory=dict)
    compared: dict[str, Compared] = field(default_factory=dict)
    mismatched: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    permanent: set[str] = field(default_factory=set)


class CanaryEngines(Protocol):
    """The part of `EngineClient` that a canary check needs."""

    async def chat(self, url: str, request: ChatCompletionRequest) -> ChatCompletion: ...

    async def models(self, url: str) -> ModelList: ...


#: Function that checks engines, by URL, after a publication. The given `Forward` must compute with exactly the weights
#: that were published.
CanaryCheck = Callable[[Iterable[str], PublishReport, Forward, Depth], Awaitable[CanaryFindings]]


class _Mismatched(Exception):
    """Raised if an engine's answer does not match the published weights; the message says why."""


async def check_canary(
    canary: Canary,
    engines: CanaryEngines,
    grace: Grace,
    urls: Iterable[str],
    published: PublishReport,
    forward: Forward,
    depth: Depth = Depth.JOINING,
) -> CanaryFindings:
    """Check the engines at `urls` concurrently; only a joining one is asked for its digest, as engines verify each
    update's. Bind the first three arguments to get a `CanaryCheck`.
    """
    findings, places = CanaryFindings(), asyncio.Semaphore(_AT_ONCE)
    canary = canary.at(depth)

    def in_time(url: str, what: str) -> AbstractAsyncContextManager[None]:
        return grace.within(what, url, engines=len(published.pauses_s), most_s=canary.deadline_s)

    async def check_one(url: str) -> None:
        try:
            context = canary.context_length
            if depth is Depth.JOINING:
                async with in_time(url, "the digest"):
                    cards = (await engines.models(url)).data
                    served = {card.digest for card in cards}
                    if published.digest and served != {published.digest}:
                        raise _Mismatched(
                            f"the digest of its weights must be {published.digest}, it reports "
                            f"{', '.join(map(str, served))}"
                        )
                context = min([context, *(card.context_length for card in cards)])
            async with places, in_time(url, "the canary"):
                short = await _answer(canary, engines, url, published.version)
            compared = await _compared(canary, [short], published, forward)
            findings.compared[url] = compared
            worst = _worst_difference(canary, compared)
            longer = []
            for number, prompt in enumerate(canary.longer_prompts(short, context) if depth is Depth.JOINING else ()):
                async with in_time(url, f"longer canary {number}"):
                    longer.append(await _answer(canary, engines, url, published.version, prompt))
            if longer:
                worst = max(worst, _worst_difference(canary, await _compared(canary, longer, published, forward)))
            findings.worst[url] = worst
        except _Mismatched as error:
            findings.mismatched[url] = str(error)
        except TimeoutError as error:
            findings.failed[url] = f"the canary had no answer {error}"
        except (ContractError, EngineUnreachable) as error:
            if isinstance(error, ContractError) and error.persistence is Persistence.PERMANENT:
                findings.permanent.add(url)
            findings.failed[url] = f"the canary was not answered: {error}"

    await asyncio.gather(*(check_one(url) for url in urls))
    return findings


async def _answer(
    canary: Canary, engines: CanaryEngines, url: str, version: int, prompt: list[int] | None = None
) -> ChatCompletion:
    while True:
        try:
            return await engines.chat(url, canary.request(version, prompt))
        except Overloaded:
            await asyncio.sleep(_PAUSE_S)


def _worst_difference(canary: Canary, compared: Compared) -> float:
    """Return the largest difference of all answers' tokens. Raises `_Mismatched` if the tokens exceed the tolerance."""
    differences = np.abs(compared.theirs - compared.ours)
    allowed, worst, mean = canary.tolerance, float(differences.max()), float(differences.mean())
    if not (math.isfinite(worst) and worst <= allowed.worst and mean <= allowed.mean):
        longest = max(int(each.turns[0].context_token_ids.size) for each in compared.rollouts)
        raise _Mismatched(
            f"log-probs of {differences.size} canary tokens must be within {allowed} of the trainer's; after prompts "
            f"of up to {longest} tokens, the worst is {worst:.3g} off, the mean {mean:.3g}"
        )
    return worst


async def _compared(
    canary: Canary, completions: Sequence[ChatCompletion], published: PublishReport, forward: Forward
) -> Compared:
    rollouts, theirs, ours = list[Rollout](), [], []
    for completion in completions:
        if completion.epoch != published.epoch:
            raise _Mismatched(
                f"the canary must be sampled in epoch {published.epoch}, its answer is of {completion.epoch}"
            )
        its = canary_rollouts(completion, version=published.version, temperature=canary.temperature)
        batch = alone(its)
        try:
            expected = await forward(batch)
        except BatchError as error:
            raise _Mismatched(f"the trainer cannot compute its answer: {error}") from error
        except NonFiniteError as error:
            raise _Mismatched(f"the trainer has no log-probs to compare with: {error}") from error
        rollouts += its
        theirs.append(batch.behavior_logprobs[batch.loss_mask])
        ours.append(expected[batch.loss_mask])
    return Compared(tuple(rollouts), np.concatenate(theirs), np.concatenate(ours))


def canary_rollouts(completion: ChatCompletion, *, version: int, temperature: float = 1.0) -> list[Rollout]:
    """Convert a canary's answer, with the engine's log-probs, to rollouts. Raises `_Mismatched` if it is invalid."""
    if not completion.choices:
        raise _Mismatched("the canary must be answered with at least one choice, its answer has none")
    return [_rollout(completion, choice, version, temperature) for choice in completion.choices]


def _rollout(completion: ChatCompletion, choice: Choice, version: int, temperature: float) -> Rollout:
    prompt, tokens, logprobs = completion.prompt_token_ids, choice.token_ids, choice.token_logprobs
    if not prompt or not tokens or logprobs is None or len(logprobs) != len(tokens):
        raise _Mismatched(
            f"the canary must be answered with token ids and their log-probs; choice {choice.index} is not"
        )
    if choice.version_spans != [(version, len(tokens))]:
        raise _Mismatched(f"the canary must be sampled by version {version}, its spans are {choice.version_spans}")
    try:
        context_ids, sampled_ids = np.array(prompt, np.int32), np.array(tokens, np.int32)
    except OverflowError as error:
        raise _Mismatched(
            f"the canary must be answered with token ids, choice {choice.index} has others: {error}"
        ) from None
    prompt_routed, routed = completion.prompt_routed_experts, choice.routed_experts
    turn = Turn(
        context_token_ids=context_ids,
        token_ids=sampled_ids,
        behavior_logprobs=np.array(logprobs, np.float32),
        spans=(VersionSpan(version, len(tokens)),),
        routed_experts=None if routed is None else off_the_wire(routed),
        context_routed_experts=None if prompt_routed is None else of_context(prompt_routed),
    )
    return Rollout(
        turns=(turn,),
        verdict=Verdict(outcome=Outcome.CORRECT, reward=0.0),
        finish_reason=choice.finish_reason.value,
        temperature=temperature,
        epoch=completion.epoch,
    )
