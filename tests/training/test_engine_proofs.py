"""Engines are tested by their canary answers and rollouts; a failing engine gets a reason that names its fault."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from inference_contract.schemas import (
    AssistantMessage,
    ChatCompletion,
    ChatMessage,
    Choice,
    FinishReason,
    ModelList,
    Usage,
)
from inference_contract.weights import OnUpdate
from pipelinerl.messages import Directive, TrainerKnobs
from pipelinerl.numerics.logprobs import log_softmax
from pipelinerl.objective.catalogue import PRESETS
from pipelinerl.plugins.bigram.model import BigramModel
from pipelinerl.plugins.bigram.trainer import BigramTrainer
from pipelinerl.training.batch import BatchRules, build
from pipelinerl.training.canary_check import TOLERANCES, Canary, Compared, check_canary
from pipelinerl.training.engine_proofs import EngineProofs
from pipelinerl.training.packing import alone
from pipelinerl.training.passes import ForwardPasses
from pipelinerl.training.publishing import Publishing
from pipelinerl.training.rollouts.admission import Proof
from pipelinerl.training.step import Step
from pipelinerl.weights.grace import Grace
from pipelinerl.weights.publisher import PublishReport
from tests.fakes.rollouts import group, rollout
from trainer_contract.types import TrainerSpec

URL, OTHER, VOCAB, TOKENS = "http://a", "http://b", 30, 12
Table = np.ndarray


def _distribution(logits, temperature):
    exact = np.exp(log_softmax(logits.astype(np.float64), np.full(len(logits), temperature)))
    return exact / exact.sum(axis=1, keepdims=True)


class World:
    """A bigram trainer at a version of random weights, and an engine that samples by tables of its own."""

    def __init__(self, path):
        BigramModel.random(VOCAB, seed=0).save(path)
        self.trainer = BigramTrainer()
        self.trainer.init_worker(TrainerSpec(model_path=path))
        self.draw = np.random.default_rng(0)
        self.tables = [self.draw.normal(size=(VOCAB, VOCAB)).astype(np.float32)]
        for _ in range(60):
            self.tables.append(self.tables[-1] + 0.01 * self.draw.normal(size=(VOCAB, VOCAB)).astype(np.float32))
        self.noise = 0.1 * self.draw.normal(size=(VOCAB, VOCAB)).astype(np.float32)
        self.version = 0
        self.proofs = EngineProofs(self, self.trainer.weight_layout(), samples_every=1)
        self.publish(0)
        self.proofs.joined(URL, self.answers())

    def forward(self, batches):
        return self.forward_at(batches, self.weights(self.version))

    def forward_at(self, batches, weights):
        return self.trainer.forward_at(batches, weights)

    def weights(self, version):
        return {"bigram.logits": self.tables[version].reshape(-1).view(np.uint8)}

    def publish(self, version):
        self.version = version
        self.proofs.publish(version, lambda: [("bigram.logits", self.tables[version])])

    def answers(self, table=None, *, sampled_at=1.0, temperature=1.0, reported=1.0):
        table = self.tables[self.version] if table is None else table
        made = []
        for _ in range(8):
            ids = [2]
            for _ in range(TOKENS):
                ids.append(int(self.draw.choice(VOCAB, p=_distribution(table[ids[-1:]], sampled_at)[0])))
            theirs = np.log(_distribution(table[ids[:-1]], reported))[np.arange(TOKENS), ids[1:]]
            noisy = (theirs + 1e-6 * self.draw.normal(size=TOKENS)).astype(np.float32)
            one = rollout(prompt=ids[:1], sampled=ids[1:], version=self.version)
            turn = replace(one.turns[0], behavior_logprobs=noisy)
            made.append(replace(one, turns=(turn,), temperature=temperature))
        batch = alone(made)
        (ours,) = self.forward([batch])
        return Compared(tuple(made), batch.behavior_logprobs[batch.loss_mask], ours[batch.loss_mask])

    def fails(self, answers, *, versions):
        """Return the reason of the first failure within so many versions; empty if there is none."""
        for _ in range(versions):
            self.publish(self.version + 1)
            compared = answers()
            self.proofs.add(URL, compared)
            if reason := self.proofs.failure(URL, self.version, compared):
                return reason
        return ""


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def changed(compared, change):
    return replace(compared, theirs=change(compared.theirs))


def shifted(logprobs):
    return np.roll(logprobs, 1)


@pytest.mark.parametrize(
    ("fault", "versions", "reason"),
    [
        (lambda w: w.answers(), 40, ""),
        (lambda w: w.answers(w.tables[w.version - 1]), 1, "they fit the weights of version 5: it has not applied"),
        (lambda w: w.answers(w.tables[0]), 1, "they fit the weights of version 0"),
        (lambda w: w.answers(w.tables[w.version] * np.float32(1.001)), 1, "bigram.logits is scaled by 1.001"),
        (lambda w: w.answers(w.tables[w.version] * 0), 1, "bigram.logits is zero"),
        (lambda w: w.answers(w.tables[w.version].T.copy()), 1, "bigram.logits is transposed"),
        (lambda w: w.answers(w.tables[0] + 2 * (w.tables[w.version] - w.tables[0])), 1, "2 times all changes since"),
        (lambda w: w.answers(w.tables[w.version] + w.noise), 1, "unknown cause"),
        (lambda w: changed(w.answers(), lambda logprobs: np.round(logprobs, 2)), 1, "rounded to 2 decimals"),
        (lambda w: changed(w.answers(), lambda logprobs: logprobs + np.float32(1e-3)), 1, "off by 0.001 nats"),
        (lambda w: w.answers(reported=1.25), 1, "they are those of 1.25 times the temperature"),
        (lambda w: w.answers(temperature=0.7), 1, "they are those before the temperature"),
        (lambda w: changed(w.answers(), shifted), 1, "they are those of the token before"),
        (lambda w: w.answers(sampled_at=0.8), 45, "its samples do not follow the policy"),
        (lambda w: w.answers(sampled_at=1.25), 45, "as at 1.25 times the temperature"),
    ],
)
def test_faulty_engine_fails_with_a_reason_that_names_the_fault_and_a_healthy_one_passes(
    world, fault, versions, reason
):
    assert world.fails(world.answers, versions=5) == ""
    found = world.fails(lambda: fault(world), versions=versions)
    assert reason in found if reason else not found
    if "evidence 1e" in found and "samples" not in found:
        assert "at version 6" in found and "the first wrong token is number" in found


class Fleet:
    """64 engines behind one client. Each answers by the trainer's weights, `wrong` by the last version's."""

    urls = tuple(f"http://engine-{number}" for number in range(64))
    wrong = urls[40]

    def __init__(self, world):
        self.world = world
        self.reports = []
        self.computed = 0
        self.made = {}

    def forward(self, batches):
        self.computed += len(batches)
        return self.world.forward(batches)

    def forward_at(self, batches, weights):
        return self.world.forward_at(batches, weights)

    async def chat(self, url, request):
        world, version = self.world, self.world.version
        served = max(version - 1, 0) if url == self.wrong else version
        if (version, served) not in self.made:
            world.draw = np.random.default_rng(version)
            self.made[version, served] = world.answers(world.tables[served]).rollouts
        made = self.made[version, served][: request.n]
        choices = [
            Choice(
                index=number,
                message=AssistantMessage(content=""),
                finish_reason=FinishReason.LENGTH,
                token_ids=each.turns[0].token_ids[: request.max_tokens].tolist(),
                token_logprobs=each.turns[0].behavior_logprobs[: request.max_tokens].tolist(),
                version_spans=[(version, min(request.max_tokens, TOKENS))],
            )
            for number, each in enumerate(made)
        ]
        return ChatCompletion(
            id="",
            created=0,
            model="",
            choices=choices,
            usage=Usage(prompt_tokens=1, completion_tokens=1, total_tokens=2),
            prompt_token_ids=[2],
            model_version=version,
        )

    async def models(self, url):
        return ModelList(data=[])

    async def publish(self, publication):
        pauses = dict.fromkeys(publication.engines, 0.0)
        version = self.world.version
        return PublishReport(version=version, epoch=0, digest="", send_s=0.0, total_s=0.0, pauses_s=pauses, failed={})

    async def raise_if_fenced(self):
        pass

    async def report(self, message):
        self.reports.append(message)


async def test_of_64_engines_the_wrong_one_fails_and_equal_answers_are_computed_once(world):
    fleet = Fleet(world)
    canary = Canary(
        messages=(ChatMessage(role="user", content="a"),), tolerance=TOLERANCES["float32"], context_length=8
    )
    with ThreadPoolExecutor(1) as worker:
        publishing = Publishing(
            world.trainer,
            fleet,
            fleet,
            partial(check_canary, canary, fleet, Grace()),
            proofs=EngineProofs(fleet, world.trainer.weight_layout()),
            worker=worker,
            on_update=OnUpdate.CONTINUE,
            timeout_s=60.0,
        )

        async def published(version, **joining):
            world.publish(version)
            fleet.computed, fleet.reports = 0, []
            directive = Directive(
                answers="",
                epoch=0,
                knobs=TrainerKnobs(k=1, learning_rate=1.0, rollouts_per_step=1),
                publish_to=[*fleet.urls],
                membership=1,
                failed=[],
                checkpoint=False,
                stop=False,
                **joining,
            )
            await publishing.begin(directive, version)
            await publishing.finish()

        await published(0, to_verify=[*fleet.urls])
        assert fleet.reports[-1].worst.keys() == {*fleet.urls} and fleet.computed == 2, "answers, and at other tilts"
        await published(1)
        assert fleet.reports[-1].mismatched.keys() == {fleet.wrong}
        assert fleet.computed <= 4, "one for the healthy engines, three to prove and name the fault"
        sampled = [replace(group(0, version=1, epoch=0), engines=(url,)) for url in (fleet.wrong, fleet.urls[0])]
        assert [publishing.proof_of(each) for each in sampled] == [Proof.MISSING, Proof.COMPLETE]


def test_failed_engine_is_tested_again_only_after_it_has_joined_again(world):
    assert world.fails(lambda: changed(world.answers(), shifted), versions=1)
    assert "has not proven itself again" in world.fails(world.answers, versions=1)
    world.proofs.joined(URL, world.answers())
    assert world.fails(world.answers, versions=10) == ""


def test_rollouts_of_a_step_disprove_the_engine_that_sampled_them_and_no_other(world):
    world.proofs.joined(OTHER, world.answers())
    step = Step(rules=BatchRules(token_budget=4096), passes=ForwardPasses(policy=world.trainer))

    def failed(version, *, off):
        """Train on groups of two engines at `version`; the log-probs of one engine are off."""
        world.publish(version)
        world.trainer._worker.table[:] = world.tables[version]
        groups = []
        for index, url in enumerate((URL, OTHER)):
            rollouts = world.answers().rollouts
            turns = [
                replace(one.turns[0], behavior_logprobs=one.turns[0].behavior_logprobs + off * (url == URL))
                for one in rollouts
            ]
            members = tuple(
                replace(one, turns=(turn,), verdict=of.verdict)
                for one, turn, of in zip(
                    rollouts, turns, group(index, (0.0, 1.0) * 4, version=version).rollouts, strict=True
                )
            )
            groups.append(replace(group(index, version=version), rollouts=members, engines=(url,)))
        batch = build(groups, step.rules, objective=PRESETS["pipelinerl"].objective, producing=version + 1)
        accumulated = step.accumulate(batch)
        step.discard()
        return world.proofs.failed_rollouts(accumulated, version)

    for version in range(1, 6):
        assert failed(version, off=0.0) == {}
    found = failed(6, off=1e-3)
    assert found.keys() == {URL} and "its rollouts differ from the trainer's at version 6" in found[URL]
    assert found[URL].endswith("all of them are off by 0.001 nats")


def test_engine_whose_samples_are_wrong_does_not_join(world):
    assert "its samples do not follow the policy" in world.proofs.joined(OTHER, world.answers(sampled_at=0.2))
    assert world.proofs.joined(OTHER, world.answers()) == ""
