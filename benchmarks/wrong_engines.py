"""Measure how soon the trainer catches an engine with a fault, and how often it suspects a healthy engine.

A torch engine samples the canary's answers at each version of a training run, in a batch with other rows;
`EngineProofs` tests them as in a run. At version `FIRST` the engine gets a fault: of its weights, of the log-probs that
it reports, of its cache or of its samples. Each arm is a format of the engine's weights.

    at once       caught at the first version, before a step trains on it
    named         the reason names the fault; for a fault that only looks like noise, that its cause is unknown
    at the join   the engine has the fault from the start, and does not join; for faults of its samples, whose versions
                  are those at which samples are tested

False alarms are counted over `HEALTHY` real versions, and over lives of `LIFE` versions that are drawn from these in
blocks, up to `UPDATES` in all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.measure import Row, recorded_parts, report
from inference_contract.conformance import faults
from inference_contract.conformance.reference import Weights
from inference_contract.schemas import ChatMessage
from pipelinerl.config.sections import ModelSection
from pipelinerl.engines.batching.logit_changes import LogitChange
from pipelinerl.engines.batching.model_runner import Prefill, RowState
from pipelinerl.engines.options import EngineOptions
from pipelinerl.engines.torch.engine import load_runner
from pipelinerl.engines.torch.replica import EngineReplica
from pipelinerl.engines.torch.runner import TorchRunner
from pipelinerl.engines.torch.weights import parameters_in
from pipelinerl.enums import WeightFormat
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.numerics.evidence import EngineEvidence
from pipelinerl.rng import generator
from pipelinerl.trainers.torch.trainer import TorchTrainer
from pipelinerl.training.canary_check import Compared, Depth
from pipelinerl.training.engine_proofs import EngineProofs
from pipelinerl.training.packing import WeightedRollout, alone, pack
from pipelinerl.types import Outcome, Rollout, Turn, Verdict, VersionSpan
from trainer_contract.host_weights import copied
from trainer_contract.types import Columns, Device, Float32, HostWeights, MicroBatch, TrainerSpec, WeightDType

#: The version of the fault, and the versions that it may take to be caught.
FIRST: Final = 12
LATER: Final = 32
#: Versions between two tests of samples.
SAMPLES_EVERY: Final = 32
#: Real versions of a healthy engine; those of a resampled life, and of a block of it; and all updates that are tested.
HEALTHY: Final = 1000
LIFE: Final = 500
BLOCK: Final = 25
UPDATES: Final = 10_000
FORMATS: Final = {
    "fp32": (WeightDType.FLOAT32, WeightFormat.NATIVE),
    "bf16": (WeightDType.BFLOAT16, WeightFormat.NATIVE),
    "int8": (WeightDType.FLOAT32, WeightFormat.INT8),
}
_CONTEXT: Final = 64
_ROWS: Final = 8
_SLOTS: Final = 32
_BRIEF: Final = 16


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of an engine, and words of the reason that names it.

    `weights` returns the weights that the engine serves. `sampling` are fields of `RowState`. `report` changes the
    log-probs of an answer's tokens, which are those at `reported_at` times the temperature.
    """

    named: str = ""
    weights: faults.Fault = lambda sent: sent.due
    sampling: Mapping[str, Any] | None = None
    reported_at: float | None = None
    report: Callable[[Float32], Float32] = lambda logprobs: logprobs
    temperature: float = 1.0
    keeps_cache: bool = False


def _old(part: str) -> faults.Fault:
    """Serve the parameters whose names begin with `part` as the last version had them."""
    return lambda sent: sent.due | {name: sent.before[name] for name in sent.due if part in name}


def _shifted(logprobs: Float32) -> Float32:
    return np.roll(logprobs, 1)


#: Words that name the faults of the kit's table. A scale of o_proj and one of v_proj are the same fault.
_NAMES: Final = {
    "one tensor is the last version's": "o_proj.weight of version",
    "one tensor was never loaded": "o_proj.weight of version 0",
    "one tensor is zero": "is zero",
    "one tensor was added twice": "is doubled",
    "one tensor is transposed": "is transposed",
    "one tensor times 1.01": "is scaled by 1.01",
    "one tensor times 1.001": "is scaled by 1.001",
    "the largest weight of one tensor is doubled": "o_proj.weight has its largest weight doubled",
    "one tensor in a coarser dtype": "o_proj.weight is in a coarser dtype",
    "all tensors in a coarser dtype": "weights in a coarser dtype",
    "q and k are exchanged": "are exchanged",
    "gate and up are exchanged": "are exchanged",
    "two norms are exchanged": "are exchanged",
    "two layers' q are exchanged": "are exchanged",
    "experts are exchanged": "exchanged",
    "the untied head is the last version's": "lm_head.weight of version",
    "half of the layers are the last version's": "of version",
    "half of the layers were never loaded": "of version 0",
    "no tensor follows": "it has not applied",
    "all weights are those of the start": "the weights of version 0",
    "the adapter is applied twice": "plus 2 times all changes",
    "the adapter is applied at half its scale": "plus 0.5 times all changes",
    "all weights drift by 1e-3": "unknown cause",
    "all weights drift by 1e-4": "unknown cause",
}
FAULTS: Final = {
    **{name: Fault(_NAMES[name], weights) for name, weights in faults.WEIGHT_FAULTS.items()},
    "one norm is the last version's": Fault("layers.0.input_layernorm.weight of version", _old("layers.0.input")),
    "one layer is the last version's": Fault("layers.1 of version", _old("layers.1.")),
    "the embedding is the last version's": Fault("embed_tokens.weight of version", _old("embed_tokens")),
    "prompts' cache kept": Fault("", keeps_cache=True),
    "log-probs shifted": Fault("of the token before", report=_shifted),
    "log-probs before T": Fault("before the temperature", reported_at=1.0, temperature=0.8),
    "log-probs + 1e-3": Fault("off by 0.001", report=lambda logprobs: logprobs + np.float32(1e-3)),
    "log-probs rounded to 0.01": Fault("rounded to 2 decimals", report=lambda logprobs: np.round(logprobs, 2)),
    "log-probs of 1.25 T": Fault("1.25 times", reported_at=1.25),
    "samples at 0.8 T": Fault("0.8 times", sampling={"temperature": 0.8}),
    "samples at 1.25 T": Fault("1.25 times", sampling={"temperature": 1.25}),
    "samples of top-p 0.9": Fault("truncated", sampling={"top_p": 0.9}),
    "samples of top-p 0.95": Fault("truncated", sampling={"top_p": 0.95}),
    "samples of top-k 3": Fault("truncated", sampling={"top_k": 3}),
    "samples with penalty 0.5": Fault("penalised", sampling={"change": LogitChange({}, 0.0, 0.5)}),
}
_HEALTHY: Final = Fault()


class Push:
    """An objective that makes tokens of positive advantage likelier."""

    needs: frozenset[str] = frozenset()

    def evaluate(self, predictions: Any, columns: Columns) -> Any:
        """Return the negative mean of log-prob times advantage."""
        return -(predictions * columns["advantages"]).mean()

    def prediction_gradient(self, predictions: Any, columns: Columns) -> Any:
        """Return the gradient in closed form."""
        return -columns["advantages"] / len(predictions)


class World:
    """A trainer, its versions, and an engine of one format that may have a fault."""

    def __init__(self, path: Path, form: str, seed: int = 0) -> None:
        dtype, weights = FORMATS[form]
        self.seed = seed
        wire = dtype
        self.trainer = TorchTrainer()
        self.trainer.init_worker(TrainerSpec(model_path=path, device=Device.CPU, gather_dtype=wire))
        options = EngineOptions(
            model_path=path, model_id="", slots=_SLOTS, max_waiting=0, context_length=_CONTEXT, dtype=dtype,
            wire_dtype=wire, weights=weights, device=Device.CPU,
        )  # fmt: skip
        self.runner: TorchRunner = load_runner(options, starts_early=False)
        self.replica = None if form == "fp32" else EngineReplica(options)
        self.wire: torch.dtype = getattr(torch, wire.value)
        self.proofs = EngineProofs(self, self.trainer.weight_layout(), self.replica, samples_every=SAMPLES_EVERY)
        self.start: HostWeights = copied(self.trainer.gather_weights())
        self.current = self.start
        words, tokenizer = generator(seed, "words"), ChatTokenizer.load(path)
        texts = [" ".join("".join(words.choice(list("abcdefghij"), 5)) for _ in range(6)) for _ in range(8)]
        self.prompts = [tokenizer.encode_chat([ChatMessage(role="user", content=text)]) for text in texts]

    # --- the trainer, at the weights of the version that is tested ---------------------------------------------------

    def forward(self, batches: Sequence[MicroBatch]) -> list[Float32]:
        """Return log-probs at the weights of the current version."""
        return self.trainer.forward_at(batches, self.current)

    def forward_at(self, batches: Sequence[MicroBatch], weights: HostWeights) -> list[Float32]:
        """Return log-probs at other weights."""
        return self.trainer.forward_at(batches, weights)

    def train(self, version: int) -> None:
        """Take an optimizer step on answers to a prompt, with random advantages."""
        draw = generator(self.seed, "advantages", version)
        weighted = [
            WeightedRollout(
                rollout=each, advantages=np.full(each.num_sampled_tokens, draw.choice([-1.0, 1.0])), token_weight=1.0
            )
            for each in self.answer(version, [self.prompts[1 + version % 7]] * _ROWS, _BRIEF, _HEALTHY)
        ]
        self.trainer.backward([each.micro_batch for each in pack(weighted, token_budget=8192)], Push())
        self.trainer.optimizer_step(learning_rate=5e-4)
        self.current = copied(self.trainer.gather_weights())

    # --- the engine --------------------------------------------------------------------------------------------------

    def publish(self, version: int, weights: HostWeights, before: HostWeights, fault: Fault = _HEALTHY) -> None:
        """Give trainer, replica and engine the weights of a version; those of the engine get the fault."""
        self.current = weights
        self.proofs.publish(version, weights.items)
        served = fault.weights(faults.Sent(*map(self._tensors, (self.start, before, weights))))
        for name, into in parameters_in(self.runner.staging(), self.runner.layout):
            into.copy_(served[name])
        self.runner.finish_staging()
        if fault.keeps_cache:
            self.runner._weights.swap()
        else:
            self.runner.swap()

    def _tensors(self, weights: HostWeights) -> Weights:
        shapes = {info.name: info.shape for info in self.trainer.weight_layout()}
        return {
            name: torch.from_numpy(data.copy()).view(self.wire).view(shapes[name]) for name, data in weights.items()
        }

    def answer(self, version: int, prompts: Sequence[list[int]], most: int, fault: Fault) -> list[Rollout]:
        """Sample one answer of each prompt, of `most` tokens, as the engine reports it, beside up to 24 other rows."""
        runner, rows = self.runner, range(len(prompts))
        draw, beside = (
            generator(self.seed, "noise", version),
            generator(self.seed, "beside", version, most, len(prompts)),
        )
        others = [self.prompts[int(beside.integers(8))] for _ in range(int(beside.integers(_SLOTS - _ROWS + 1)))]
        everything = [*prompts, *others]
        most = min(most, _CONTEXT - max(map(len, everything)))
        runner.prefill([Prefill(prompt[:-1], [row]) for row, prompt in enumerate(everything)])
        sampling = {"temperature": fault.temperature, "top_p": 1.0, "top_k": 0, **(fault.sampling or {})}
        runner.place(
            [
                RowState(row, prompt[-1], len(prompt) - 1, int(draw.integers(2**62)), **sampling)
                for row, prompt in enumerate(everything)
            ]
        )
        steps = [runner.decode(len(everything)) for _ in range(most)]
        tokens = [[ids[row] for ids, _ in steps] for row in rows]
        logprobs = [[values[row] for _, values in steps] for row in rows]
        runner.release(range(len(everything)))
        if fault.sampling or fault.reported_at:
            logprobs = runner.decoded_logprobs(prompts, tokens, [fault.reported_at or 1.0] * len(prompts))
        return [
            Rollout(
                turns=(
                    Turn(
                        context_token_ids=np.array(prompt, np.int32),
                        token_ids=np.array(ids, np.int32),
                        behavior_logprobs=fault.report(np.array(values, np.float32)),
                        spans=(VersionSpan(version, len(ids)),),
                    ),
                ),
                verdict=Verdict(outcome=Outcome.CORRECT, reward=0.0),
                finish_reason="length",
                temperature=fault.temperature,
            )
            for prompt, ids, values in zip(prompts, tokens, logprobs, strict=True)
        ]

    def compared(self, version: int, rows: int = _ROWS, most: int = _BRIEF, fault: Fault = _HEALTHY) -> Compared:
        """Return the answers to the canary, with the trainer's log-probs."""
        rollouts = self.answer(version, [self.prompts[0]] * rows, most, fault)
        batch = alone(rollouts)
        ours = self.proofs.score(batch)
        return Compared(tuple(rollouts), batch.behavior_logprobs[batch.loss_mask], ours[batch.loss_mask])

    def failure(self, version: int, answers: Compared) -> tuple[str, int]:
        """Test a version as a run does; return why the engine fails, empty if it passes, and the tokens tested."""
        tested = brief(answers) if self.proofs.depth("a", version) is Depth.BRIEF else answers
        if self.proofs.add("a", tested) and tested is not answers:
            tested = answers
            self.proofs.add("a", tested, more=True)
        return self.proofs.failure("a", version, tested), tested.theirs.size


def brief(answers: Compared) -> Compared:
    """Return the tokens of a brief check."""
    _, tokens = Depth.BRIEF.value
    return Compared(answers.rollouts[:1], answers.theirs[:tokens], answers.ours[:tokens])


def run(quick: bool = False, only: Sequence[str] = tuple(FORMATS), seeds: Sequence[int] = (0,)) -> None:
    """Run all arms, or those that `only` names, print the table and, unless `quick`, write the record."""
    rows = list[Row]()
    path = ModelSection(path="shipped:tiny_speller").resolved
    for form in only:
        measured = [_arm(World(path, form, seed), healthy=FIRST + LATER if quick else HEALTHY) for seed in seeds]
        by_seed = {f"seed {seed}": each for seed, each in zip(seeds, measured, strict=True)}
        record = recorded_parts("wrong_engines", tuple(FORMATS)) | {form: by_seed}
        rows += [row for each in measured for row in _rows(form, each)]
        report("wrong_engines", rows, record, quick=quick, title="wrong engines: versions until an engine is caught")


def _arm(world: World, *, healthy: int) -> dict[str, Any]:
    """Train a healthy engine through its versions, then give it each fault."""
    versions, alarms, answers = [world.current], 0, list[Compared]()
    world.publish(0, world.current, world.current)
    world.proofs.joined("a", world.compared(0, most=32))
    state: Any = None
    largest = 0.0
    for version in range(1, healthy + 1):
        before = world.current
        world.train(version)
        if version < FIRST + LATER:
            versions.append(world.current)
        world.publish(version, world.current, before)
        answers.append(world.compared(version))
        reason, _ = world.failure(version, answers[-1])
        largest = max(largest, float(np.abs(answers[-1].theirs - answers[-1].ours).max()))
        if reason:
            alarms += 1
            print(version, reason)
            world.proofs.joined("a", answers[-1])
        if version == FIRST - 1:
            state = copy.deepcopy((world.proofs._canary, world.proofs._kept))
    updates, suspected = _resampled(answers, UPDATES - healthy if healthy == HEALTHY else LIFE)
    caught = {name: each for name, fault in FAULTS.items() if (each := _caught(world, versions, state, fault))}
    return {
        "healthy_versions": healthy,
        "false_alarms": alarms,
        "resampled_versions": updates,
        "resampled_alarms": suspected,
        "largest": largest,
        "faults": caught,
    }


def _resampled(answers: Sequence[Compared], updates: int) -> tuple[int, int]:
    """Return how many versions of resampled lives were tested for log-probs, and how many lives had an alarm."""
    draw, alarms = generator(4, "lives"), 0
    for _ in range(max(1, updates // LIFE)):
        evidence, begins = EngineEvidence(), int(draw.integers(len(answers)))
        evidence.anchor(answers[begins].theirs, answers[begins].ours)
        blocks = draw.integers(max(1, len(answers) - BLOCK), size=LIFE // BLOCK)
        for number in ((blocks[:, None] + np.arange(BLOCK)).reshape(-1) % len(answers)).tolist():
            given = answers[number]
            first = brief(given) if evidence.is_exact else given
            wrong = evidence.add(first.theirs, first.ours)
            if wrong is None and evidence.is_suspicious:
                wrong = evidence.add(given.theirs, given.ours, more=True)
            if wrong is not None:
                alarms += 1
                break
    return max(1, updates // LIFE) * LIFE, alarms


def _caught(world: World, versions: Sequence[HostWeights], state: Any, fault: Fault) -> dict[str, Any] | None:
    """Return when the fault is caught, and why; None if the model has no such part."""
    world.proofs._canary, world.proofs._kept = copy.deepcopy(state)
    tested, joins = 0, True
    world.proofs.samples_every = 1 if fault.sampling else SAMPLES_EVERY
    if fault.sampling:
        world.publish(FIRST, versions[FIRST], versions[FIRST - 1], fault)
        joins = not world.proofs.joined("b", world.compared(FIRST, most=32, fault=fault))
    for version in range(FIRST, min(FIRST + LATER, len(versions))):
        try:
            world.publish(version, versions[version], versions[version - 1], fault)
        except LookupError:
            return None
        reason, tokens = world.failure(version, world.compared(version, fault=fault))
        tested += tokens
        if reason:
            is_named = bool(fault.named) and fault.named in reason
            found = {"versions": version - FIRST + 1, "tokens": tested, "named": is_named, "reason": reason}
            return found | ({"joins": joins} if fault.sampling else {})
    return {"versions": None, "tokens": tested, "named": False, "reason": ""}


def _rows(form: str, measured: Mapping[str, Any]) -> Iterator[Row]:
    tried = measured["faults"]
    caught = [each for each in tried.values() if each["versions"]]
    named, at_once = sum(each["named"] for each in caught), sum(each["versions"] == 1 for each in caught)
    alarms = measured["false_alarms"] + measured["resampled_alarms"]
    updates = measured["healthy_versions"] + measured["resampled_versions"]
    yield Row(f"{form}: false alarms", f"{alarms} of {updates} updates", "0", alarms == 0)
    yield Row(f"{form}: caught", f"{len(caught)} of {len(tried)}, {at_once} at once")
    yield Row(f"{form}: named", f"{named} of {len(caught)}", ">= 90 %", named >= 0.9 * len(caught))
    for name, each in tried.items():
        joins = "" if each.get("joins", True) else ", caught at the join"
        when = f"version {each['versions']}, after {each['tokens']} tokens" if each["versions"] else "not caught"
        yield Row(f"{form}: {name}", f"{when}, named {each['named']}{joins}")
