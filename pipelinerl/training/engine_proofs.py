"""`EngineProofs`: the evidence for or against each engine, from its answers to the canary and from its rollouts.

    joins      full canary ─▶ baseline
    version v  brief canary ─▶ log-probs are tested ───────────────────┐
               unlikely, or samples are due ─▶ more answers are tested ┤
    step v+1   tokens that v sampled, as the step recomputes them     ─┴▶ failure: engine, version, likeliest fault

A step changes the weights only after both tests, so no step trains on tokens of an engine that fails. Rollouts have a
baseline of their own, since their prompts, lengths and batches differ from the canary's. Only log-probs of rollouts are
tested: those that train were chosen by their rewards, so their samples do not follow the policy.

`FaultSearch` names a fault. Older weights are kept of models of up to `MOST_KEPT` bytes. All methods block; call them
on the trainer's thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Final, Protocol

import numpy as np

from pipelinerl.numerics.causes import sampled_tokens
from pipelinerl.numerics.evidence import TILTS, EngineEvidence
from pipelinerl.training.canary_check import Compared, Depth
from pipelinerl.training.fault_search import FaultSearch
from pipelinerl.training.packing import alone
from pipelinerl.training.step import Accumulated
from pipelinerl.types import Rollout
from trainer_contract.host_weights import copied, num_bytes
from trainer_contract.types import Float32, HostWeights, MicroBatch, ParameterInfo

#: The largest model, in bytes of its weights, of which older weights are kept.
MOST_KEPT: Final = 2**26
#: The most tokens of an engine's rollouts that one step tests.
_MOST_TOKENS: Final = 512
#: The most rollouts with which the fault of an engine's rollouts is searched.
_SEARCHED: Final = 8


class Scorer(Protocol):
    """The part of a trainer that computes log-probs with its own or with given weights."""

    def forward(self, micro_batches: Sequence[MicroBatch]) -> list[Float32]: ...

    def forward_at(self, micro_batches: Sequence[MicroBatch], weights: HostWeights) -> list[Float32]: ...


class Replica(Scorer, Protocol):
    """A scorer that computes as an engine does, with weights of its own."""

    def hold(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Take the trainer's weights, or the items of `HostWeights`, as an engine does."""
        ...


@dataclass(slots=True)
class EngineProofs:
    """The evidence on each engine by base URL. An engine without evidence has failed, and must join again."""

    trainer: Scorer
    layout: Sequence[ParameterInfo]
    replica: Replica | None = None
    """Computes the canary's log-probs in the engines' arithmetic; None if it is the trainer's, or unknown."""
    samples_every: int = 32
    """Versions between two tests of samples, which need more answers and several forward passes."""
    _canary: dict[str, EngineEvidence] = field(default_factory=dict)
    _rollouts: dict[str, EngineEvidence] = field(default_factory=dict)
    _kept: dict[int, HostWeights] = field(default_factory=dict)
    _wrong: dict[str, str] = field(default_factory=dict)
    """Place of the first wrong token of engines whose evidence alarms."""
    _scores: dict[tuple[Any, ...], Float32] = field(default_factory=dict)
    """Log-probs that were computed since the last publication, by what determines them."""

    def publish(self, version: int, gather: Callable[[], Iterable[tuple[str, Any]]]) -> None:
        """Take the trainer's weights of `version`; copies of the first and the last three versions stay."""
        self._scores.clear()
        if self.replica is not None:
            self.replica.hold(gather())
        if sum(map(num_bytes, self.layout)) <= MOST_KEPT:
            self._kept[version] = copied(gather())
            for older in sorted(self._kept)[1:-3]:
                del self._kept[older]

    def score(self, batch: MicroBatch) -> Float32:
        """Return the log-probs f32 [T] of the canary's answers at the published weights; equal answers cost once."""
        return self._shared(self.replica or self.trainer, batch)

    def joined(self, url: str, compared: Compared) -> str:
        """Begin an engine's evidence with its canary's answers; return why its samples fail, or ""."""
        self._wrong.pop(url, None)
        self._canary[url], self._rollouts[url] = EngineEvidence(), EngineEvidence()
        self._canary[url].anchor(compared.theirs, compared.ours)
        return self._failed_samples(url, compared)

    def tests_samples(self, version: int) -> bool:
        return version % self.samples_every == 0

    def depth(self, url: str, version: int) -> Depth:
        """Return the depth of the check of an engine: close if its samples are tested, or its arithmetic is coarse."""
        evidence = self._canary.get(url)
        is_brief = evidence is not None and evidence.is_exact and not self.tests_samples(version)
        return Depth.BRIEF if is_brief else Depth.CLOSE

    def add(self, url: str, compared: Compared, *, more: bool = False) -> bool:
        """Test an engine's log-probs; return whether to test more of its answers. `more` is True for those."""
        evidence = self._canary.get(url)
        if evidence is None:
            return False
        wrong = evidence.add(compared.theirs, compared.ours, more=more)
        if wrong is not None:
            self._wrong.setdefault(url, _place(compared, wrong))
        return wrong is not None or evidence.is_suspicious

    def failure(self, url: str, version: int, compared: Compared) -> str:
        """Return why an engine fails, by its answers that `add` tested, `compared` the last; empty if it passes."""
        evidence = self._canary.get(url)
        if evidence is None:
            return f"it failed before version {version}, and has not proven itself again"
        if url in self._wrong:
            place, fault = self._wrong[url], self.fault(version, compared)
            return self._failed(
                url,
                f"its log-probs differ from the trainer's at version {version} more than they did when it joined "
                f"(evidence {_shown(evidence.logprobs.log_evidence)}); {place}; {fault}",
            )
        return self._failed_samples(url, compared) if self.tests_samples(version) else ""

    def failed_rollouts(self, accumulated: Accumulated, version: int) -> dict[str, str]:
        """Test the tokens of a step that `version`, the weights before the step, sampled; return failures by engine."""
        failures = {}
        for url, theirs, ours in _on_policy(accumulated, version):
            evidence = self._rollouts.get(url)
            if evidence is not None:
                wrong = evidence.add(theirs[:_MOST_TOKENS], ours[:_MOST_TOKENS])
                if wrong is not None:
                    fault = ""
                    if answers := _whole_rollouts(accumulated, url, version):
                        batch = alone(answers)
                        its, mask = self.score(batch), batch.loss_mask
                        compared = Compared(tuple(answers), batch.behavior_logprobs[mask], its[mask])
                        fault = f"; {self.fault(version, compared)}"
                    failures[url] = self._failed(
                        url,
                        f"the log-probs of its rollouts differ from the trainer's at version {version} more than they "
                        f"did at first (evidence {_shown(evidence.logprobs.log_evidence)}); a wrong token has "
                        f"{theirs[wrong]:.5g} by the engine and {ours[wrong]:.5g} by the trainer{fault}",
                    )
        return failures

    def fault(self, version: int, compared: Compared) -> str:
        tilted, _ = self._tilted(compared.rollouts)
        search = FaultSearch(
            version=version,
            compared=compared,
            score=self._scored,
            tilted=tilted,
            kept=self._kept,
            layout=self.layout,
        )
        return search.sentence()

    def _failed_samples(self, url: str, compared: Compared) -> str:
        samples = self._canary[url]
        if samples.add_samples(*self._tilted(compared.rollouts)) is None:
            return ""
        return self._failed(
            url,
            f"its samples do not follow the policy (evidence {_shown(samples.samples.log_evidence)}): they are as "
            f"at {TILTS[samples.samples.best]:g} times the temperature, or truncated, or penalised; look at its "
            "server's sampling defaults",
        )

    def _tilted(self, rollouts: Sequence[Rollout]) -> tuple[Float32, Float32]:
        """Return the log-probs of N sampled tokens at `TILTS` times their temperature [tilts, N], and at theirs [N]."""
        batch = alone([replace(each, temperature=each.temperature * a) for a in (*TILTS, 1.0) for each in rollouts])
        scored = self._shared(self.trainer, batch)[batch.loss_mask].reshape(len(TILTS) + 1, -1)
        return scored[:-1], scored[-1]

    def _scored(self, rollouts: Sequence[Rollout], weights: HostWeights | None = None) -> Float32:
        batch = alone(rollouts)
        if weights is None:
            return self.score(batch)[batch.loss_mask]
        (logprobs,) = (self.replica or self.trainer).forward_at([batch], weights)
        return logprobs[batch.loss_mask]

    def _shared(self, scorer: Scorer, batch: MicroBatch) -> Float32:
        columns = (batch.token_ids, batch.position_ids, batch.loss_mask, batch.temperatures, batch.routed_experts)
        key = (scorer is self.trainer, *(None if column is None else column.tobytes() for column in columns))
        if key not in self._scores:
            (self._scores[key],) = scorer.forward([batch])
        return self._scores[key]

    def _failed(self, url: str, reason: str) -> str:
        for known in (self._canary, self._rollouts, self._wrong):
            known.pop(url, None)
        return reason


def _on_policy(accumulated: Accumulated, version: int) -> Iterator[tuple[str, Float32, Float32]]:
    """Yield the log-probs, by engine and trainer, of the tokens that one engine sampled at `version`, per engine."""
    batch = accumulated.batch
    found: dict[str, list[tuple[Float32, Float32]]] = {}
    for number, (micro_batch, ours) in enumerate(zip(batch.micro_batches, accumulated.logprobs, strict=True)):
        versions = micro_batch.behavior_versions
        if ours is None or versions is None or not (versions == version).any():
            continue
        tokens = sampled_tokens([micro_batch], [ours])
        if tokens is None:
            continue
        is_own = (tokens.versions == version) & (tokens.turn_versions == version)
        if not is_own.any():
            continue
        groups = [batch.groups[group] for group in batch.scored.groups[batch.rollouts_of(number)]]
        urls = np.array([group.engines[0] if len(group.engines) == 1 else "" for group in groups])
        by_token = urls[tokens.responses - 1]
        for url in np.unique(by_token[is_own]).tolist():
            its = is_own & (by_token == url)
            found.setdefault(url, []).append((tokens.behavior_logprobs[its], tokens.logprobs[its]))
    for url, parts in found.items():
        if url:
            yield url, np.concatenate([theirs for theirs, _ in parts]), np.concatenate([ours for _, ours in parts])


def _whole_rollouts(accumulated: Accumulated, url: str, version: int) -> list[Rollout]:
    """Return up to `_SEARCHED` rollouts that the engine alone sampled, wholly with `version`."""
    groups = (group for group in accumulated.batch.groups if group.engines == (url,))
    whole = (
        rollout
        for group in groups
        for rollout in group.rollouts
        if {span.model_version for turn in rollout.turns for span in turn.spans} == {version}
    )
    return list(islice(whole, _SEARCHED))


def _place(compared: Compared, token: int) -> str:
    ends = np.cumsum([each.num_sampled_tokens for each in compared.rollouts])
    answer = int(np.searchsorted(ends, token, side="right"))
    first = int(ends[answer]) - compared.rollouts[answer].num_sampled_tokens
    return (
        f"the first wrong token is number {token - first + 1} of canary answer {answer + 1}, "
        f"{compared.theirs[token]:.5g} by the engine and {compared.ours[token]:.5g} by the trainer"
    )


def _shown(log_evidence: float) -> str:
    return f"1e{log_evidence / math.log(10):.0f}"
