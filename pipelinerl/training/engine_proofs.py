"""`EngineProofs`: the evidence for or against each engine, from its answers to the canary and from its rollouts.

    joins      full canary ─▶ baseline
    version v  brief canary ─▶ log-probs are tested, at times samples ─┐
    step v+1   tokens that v sampled, as the step recomputes them     ─┴▶ failure: engine, version, likeliest fault

A step changes the weights only after both tests, so no step trains on tokens of an engine that fails. Rollouts have a
baseline of their own, since their prompts, lengths and batches differ from the canary's. Only log-probs of rollouts are
tested: those that train were chosen by their rewards, so their samples do not follow the policy.

A fault gets the name of the hypothesis that explains the engine's log-probs: another temperature, log-probs shifted by
a token, older weights, or one tensor or layer of older weights. Older weights are kept of models of up to `MOST_KEPT`
bytes. All methods block; call them on the trainer's thread.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import numpy as np

from pipelinerl.numerics.causes import sampled_tokens
from pipelinerl.numerics.evidence import TILTS, EngineEvidence
from pipelinerl.training.canary_check import Compared
from pipelinerl.training.packing import alone
from pipelinerl.training.step import Accumulated
from pipelinerl.types import Rollout
from trainer_contract.host_weights import copied, num_bytes
from trainer_contract.types import Float32, HostWeights, MicroBatch, ParameterInfo

#: The largest model, in bytes of its weights, of which older weights are kept.
MOST_KEPT: Final = 2**26
#: The most tokens of an engine's rollouts that one step tests.
_MOST_TOKENS: Final = 512
#: The share of the mean difference that a hypothesis may leave unexplained.
_UNEXPLAINED: Final = 0.2
#: The part of a parameter's name that names its layer.
_LAYER: Final = re.compile(r"^.*?\.\d+(?=\.)")


class Scorer(Protocol):
    """The part of a trainer that computes log-probs with its own or with given weights."""

    def forward(self, micro_batches: Sequence[MicroBatch]) -> list[Float32]:
        """Return the log-probs f32 [T] of each micro-batch."""
        ...

    def forward_at(self, micro_batches: Sequence[MicroBatch], weights: HostWeights) -> list[Float32]:
        """Return the log-probs f32 [T] of each micro-batch at the given weights."""
        ...


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
    samples_every: int = 8
    """Versions between two tests of samples, which need several forward passes: faults of sampling stay."""
    _canary: dict[str, EngineEvidence] = field(default_factory=dict)
    _rollouts: dict[str, EngineEvidence] = field(default_factory=dict)
    _kept: dict[int, HostWeights] = field(default_factory=dict)

    @property
    def scorer(self) -> Scorer:
        """The scorer of the canary's answers."""
        return self.replica or self.trainer

    def publish(self, version: int, gather: Callable[[], Iterable[tuple[str, Any]]]) -> None:
        """Take the trainer's weights of `version`; copies of the first and the last three versions stay."""
        if self.replica is not None:
            self.replica.hold(gather())
        if sum(map(num_bytes, self.layout)) <= MOST_KEPT:
            self._kept[version] = copied(gather())
            for older in sorted(self._kept)[1:-3]:
                del self._kept[older]

    def joined(self, url: str, compared: Compared) -> None:
        """Begin the evidence on an engine that has passed the canary check: its answers are the baseline."""
        self._canary[url], self._rollouts[url] = EngineEvidence(), EngineEvidence()
        self._canary[url].anchor(compared.theirs, compared.ours)

    def failure(self, url: str, version: int, compared: Compared) -> str:
        """Test an engine's answers to a brief canary; return why it fails, empty if it passes."""
        evidence = self._canary.get(url)
        if evidence is None:
            return f"it failed before version {version}, and has not proven itself again"
        evidence.begin()
        wrong = evidence.add(compared.theirs, compared.ours)
        if wrong is not None:
            fault = self.fault(version, compared)
            return self._failed(
                url,
                f"its log-probs differ from the trainer's at version {version} more than they did when it joined "
                f"(evidence {_shown(evidence.logprobs.log_evidence)}); {_place(compared, wrong)}; {fault}",
            )
        if version % self.samples_every:
            return ""
        if evidence.add_samples(*self._tilted(compared.rollouts)) is not None:
            return self._failed(
                url,
                f"its samples do not follow the policy (evidence {_shown(evidence.samples.log_evidence)}): they are as "
                f"at {TILTS[evidence.samples.best]:g} times the temperature, or truncated, or penalised; look at its "
                "server's sampling defaults",
            )
        return ""

    def failed_rollouts(self, accumulated: Accumulated, version: int) -> dict[str, str]:
        """Test the tokens of a step that `version`, the weights before the step, sampled; return failures by engine."""
        failures = {}
        for url, theirs, ours in _on_policy(accumulated, version):
            evidence = self._rollouts.get(url)
            if evidence is not None:
                evidence.begin()
                wrong = evidence.add(theirs[:_MOST_TOKENS], ours[:_MOST_TOKENS])
                if wrong is not None:
                    failures[url] = self._failed(
                        url,
                        f"the log-probs of its rollouts differ from the trainer's at version {version} more than they "
                        f"did at first (evidence {_shown(evidence.logprobs.log_evidence)}); a wrong token has "
                        f"{theirs[wrong]:.5g} by the engine and {ours[wrong]:.5g} by the trainer",
                    )
        return failures

    def fault(self, version: int, compared: Compared) -> str:
        """Return the sentence that names the likeliest fault behind the log-probs of an engine's answers."""
        rollouts, theirs, ours = compared.rollouts, compared.theirs, compared.ours
        total = float(np.abs(theirs - ours).mean())
        left, sentence = math.inf, ""
        if math.isfinite(total):
            for told, logprobs in self._hypotheses(version, rollouts, ours):
                rest = float(np.abs(theirs - logprobs).mean())
                if rest < left / 2:  # of hypotheses that explain as much, take the first
                    left, sentence = rest, told
        return sentence if left <= _UNEXPLAINED * total else "no former weights or known setting explains them"

    def _hypotheses(self, version: int, rollouts: Sequence[Rollout], ours: Float32) -> Iterator[tuple[str, Float32]]:
        if any(each.temperature != 1.0 for each in rollouts):
            raw = [replace(each, temperature=1.0) for each in rollouts]
            yield "they are those before the temperature", self._scored(raw)
        tilted, _ = self._tilted(rollouts)
        for factor, logprobs in zip(TILTS, tilted, strict=True):
            yield f"they are those of {factor:g} times the temperature", logprobs
        for by, side in ((1, "before"), (-1, "after")):
            yield f"they are those of the token {side}", np.roll(ours, by)
        for older, weights in sorted(self._kept.items(), reverse=True):
            if older < version:
                yield (
                    f"they fit the weights of version {older}: it has not applied a newer update",
                    self._scored(rollouts, weights),
                )
        yield from self._partly_old(version, rollouts)

    def _partly_old(self, version: int, rollouts: Sequence[Rollout]) -> Iterator[tuple[str, Float32]]:
        current, older = self._kept.get(version), self._kept.get(version - 1)
        if current is None or older is None:
            return
        layers: dict[str, list[str]] = {}
        for name in current:
            layers.setdefault(name, []).append(name)
            if match := _LAYER.match(name):
                layers.setdefault(match[0], []).append(name)
        for part, names in layers.items():
            mixed = {**current, **{name: older[name] for name in names}}
            yield f"they fit {part} of version {version - 1} in version {version}", self._scored(rollouts, mixed)

    def _tilted(self, rollouts: Sequence[Rollout]) -> tuple[Float32, Float32]:
        """Return the log-probs of N sampled tokens at `TILTS` times their temperature [tilts, N], and at theirs [N]."""
        copies = [replace(each, temperature=each.temperature * a) for a in (*TILTS, 1.0) for each in rollouts]
        scored = self._scored(copies, scorer=self.trainer).reshape(len(TILTS) + 1, -1)
        return scored[:-1], scored[-1]

    def _scored(
        self, rollouts: Sequence[Rollout], weights: HostWeights | None = None, *, scorer: Scorer | None = None
    ) -> Float32:
        batch = alone(rollouts)
        scorer = scorer or self.scorer
        (logprobs,) = scorer.forward([batch]) if weights is None else scorer.forward_at([batch], weights)
        return logprobs[batch.loss_mask]

    def _failed(self, url: str, reason: str) -> str:
        self._canary.pop(url, None)
        self._rollouts.pop(url, None)
        return reason


def _on_policy(accumulated: Accumulated, version: int) -> Iterator[tuple[str, Float32, Float32]]:
    """Yield the log-probs, by engine and trainer, of the tokens that one engine sampled at `version`, per engine."""
    batch = accumulated.batch
    found: dict[str, list[tuple[Float32, Float32]]] = {}
    for number, (micro_batch, ours) in enumerate(zip(batch.micro_batches, accumulated.logprobs, strict=True)):
        tokens = None if ours is None else sampled_tokens([micro_batch], [ours])
        if tokens is None:
            continue
        is_own = (tokens.versions == version) & (tokens.turn_versions == version)
        groups = [batch.groups[group] for group in batch.scored.groups[batch.rollouts_of(number)]]
        urls = np.array([group.engines[0] if len(group.engines) == 1 else "" for group in groups])
        by_token = urls[tokens.responses - 1]
        for url in np.unique(by_token[is_own]).tolist():
            its = is_own & (by_token == url)
            found.setdefault(url, []).append((tokens.behavior_logprobs[its], tokens.logprobs[its]))
    for url, parts in found.items():
        if url:
            yield url, np.concatenate([theirs for theirs, _ in parts]), np.concatenate([ours for _, ours in parts])


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
