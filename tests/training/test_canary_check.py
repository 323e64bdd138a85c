"""A canary check compares an engine's log-probs of a test prompt with the trainer's, and reports any mismatch."""

import asyncio
from dataclasses import replace

import pytest

from inference_contract.errors import Overloaded
from inference_contract.schemas import ChatMessage, ModelList
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.engines.http.server import create_app
from pipelinerl.engines.options import EngineOptions
from pipelinerl.errors import EngineUnreachable
from pipelinerl.plugins.bigram import engine as bigram_engine
from pipelinerl.plugins.bigram.model import BigramModel
from pipelinerl.plugins.bigram.trainer import BigramTrainer
from pipelinerl.plugins.warmstart.tiny_decoder import char_tokenizer
from pipelinerl.training.canary_check import TOLERANCES, Canary, CanaryFindings, Depth, check_canary
from pipelinerl.types import Priority
from pipelinerl.weights.grace import Grace
from pipelinerl.weights.publisher import PublishReport
from tests.fakes.served import in_thread
from trainer_contract.errors import NonFiniteError
from trainer_contract.types import TrainerSpec

CANARY = Canary(
    messages=(ChatMessage(role="user", content="abc"),),
    tolerance=TOLERANCES["float32"],
    context_length=64,
    deadline_s=10.0,
)


def published(*, version=0, epoch=0, digest=""):
    return PublishReport(version=version, epoch=epoch, digest=digest, send_s=0.0, total_s=0.0, pauses_s={}, failed={})


def model(path, *, seed):
    tokenizer = char_tokenizer(alphabet="abcdefghijklmnopqrstuvwxyz ")
    BigramModel.random(len(tokenizer), seed=seed).save(path)
    tokenizer.save_pretrained(str(path), save_jinja_files=False)
    return path


class World:
    """A trainer, and an engine served over HTTP whose weights, drawn from a seed, may differ from the trainer's.

    `twist` alters the engine's answers.
    """

    def __init__(self, url, client, trainer):
        self.url, self.client, self.trainer = url, client, trainer
        self.models = client.models

    async def chat(self, url, request):
        return self.twist(await self.client.chat(url, request))

    async def forward(self, batch):
        return self.trainer.forward([batch])[0]

    async def findings(self, twist=lambda completion: completion, *, canary=CANARY, depth=Depth.JOINING, **report):
        self.twist = twist
        return await check_canary(canary, self, Grace(), [self.url], published(**report), self.forward, depth)


def choices(**changes):
    """Return a twist of all choices; a change is a value, or a function of the choice."""

    def twist(completion):
        made = [
            choice.model_copy(update={name: of(choice) if callable(of) else of for name, of in changes.items()})
            for choice in completion.choices
        ]
        return completion.model_copy(update={"choices": made})

    return twist


def tokens(token):
    return choices(token_ids=lambda choice: [token] * len(choice.token_ids))


def served(path, *, seed):
    """Serve an engine whose weights are drawn from `seed`."""
    engine = bigram_engine.from_options(
        EngineOptions(model_path=model(path, seed=seed), model_id="bigram", slots=8, max_waiting=64, context_length=64)
    )
    return in_thread(create_app(engine, token=None))


@pytest.fixture(scope="module")
def equal_engine(tmp_path_factory):
    with served(tmp_path_factory.mktemp("engine"), seed=0) as url:
        yield url


@pytest.fixture
async def made(equal_engine, tmp_path):
    """Return a trainer and an engine with equal weights."""
    trainer = BigramTrainer()
    trainer.init_worker(TrainerSpec(model_path=model(tmp_path / "trainer", seed=0)))
    async with EngineClient() as client:
        yield World(equal_engine, client, trainer)


async def test_canary_check_accepts_an_engine_with_equal_weights_and_reports_the_deviation_of_other_weights(
    made, tmp_path
):
    findings = await made.findings()
    assert findings.worst[made.url] < 1e-5 and not findings.mismatched and not findings.failed
    with served(tmp_path / "other", seed=1) as url:
        (reason,) = (await World(url, made.client, made.trainer).findings()).mismatched.values()
        assert "within 0.005 nats and 0.0001 nats on average of the trainer's" in reason
        assert "inf" not in reason and "the worst is" in reason


@pytest.mark.parametrize(
    ("weights", "off", "rare", "is_proven"),
    [
        ("int8", 0.25, 0.0, True),
        ("int8", 0.35, 0.0, False),
        ("float32", 3e-6, 4e-4, True),  # a gated delta rule, step by step instead of in chunks
        ("float32", 3e-4, 0.0, False),
        ("float32", 0.0, 0.01, False),
    ],
)
async def test_canary_check_limits_the_mean_deviation_and_in_float32_the_worst(made, weights, off, rare, is_proven):
    """The engine's log-probs deviate by `off`, those of an answer's first token by `rare` more."""

    def moved(choice):
        extra = [off + rare * (choice.index == 0 and place == 0) for place in range(len(choice.token_logprobs))]
        return [logprob - each for logprob, each in zip(choice.token_logprobs, extra, strict=True)]

    canary = replace(CANARY, tolerance=TOLERANCES[weights])
    assert (made.url in (await made.findings(choices(token_logprobs=moved), canary=canary)).worst) == is_proven


async def test_brief_check_leaves_the_mean_deviation_of_coarse_weights_to_the_engines_evidence(made):
    canary = replace(CANARY, tolerance=TOLERANCES["int8"], tokens=4)
    findings = await made.findings(choices(token_logprobs=[-20.0] * 4), canary=canary, depth=Depth.BRIEF)
    compared = findings.compared[made.url]
    assert made.url in findings.worst and (compared.theirs == -20).all() and len(compared.rollouts) == 1


@pytest.mark.parametrize(
    ("twist", "report", "sentence"),
    [
        (choices(), {"version": 1}, "must be sampled by version 1, its spans are"),
        (choices(), {"epoch": 2}, "must be sampled in epoch 2, its answer is of 0"),
        (choices(), {"digest": "abc"}, "the digest of its weights must be abc, it reports"),
        (choices(token_ids=None), {}, "token ids and their log-probs; choice 0 is not"),
        (choices(token_ids=[]), {}, "choice 0 is not"),
        (choices(token_logprobs=[-0.1]), {}, "choice 0 is not"),
        (choices(version_spans=[(0, 1), (1, 3)]), {}, "must be sampled by version 0"),
        (tokens(10_000), {}, "the trainer cannot compute its answer: token_ids must lie in 0.."),
        (tokens(-1), {}, "the trainer cannot compute its answer: token_ids must lie in 0.."),
        (tokens(2**31), {}, "the canary must be answered with token ids, choice 0 has others"),
        (tokens(2**70), {}, "the canary must be answered with token ids, choice 0 has others"),
        (lambda completion: completion.model_copy(update={"choices": []}), {}, "at least one choice"),
    ],
)
async def test_invalid_answer_to_a_canary_request_counts_as_a_mismatch(made, twist, report, sentence):
    findings = await made.findings(twist, **report)
    assert sentence in findings.mismatched[made.url] and not findings.worst


async def test_canary_check_fails_on_nonfinite_logprobs_of_engine_or_trainer(made):
    nan = choices(token_logprobs=lambda choice: [float("nan")] * len(choice.token_ids))
    assert "the worst is nan off" in (await made.findings(nan)).mismatched[made.url]

    async def broken(batch):
        raise NonFiniteError("logprobs")

    findings = await check_canary(CANARY, made.client, Grace(), [made.url], published(), broken)
    assert "the trainer has no log-probs to compare with" in findings.mismatched[made.url]


class Reluctant:
    """A fake client of an engine that rejects requests, hangs or is unreachable, in the given order."""

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)

    async def chat(self, url, request):
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        await asyncio.sleep(outcome)
        raise AssertionError

    async def models(self, url):
        return ModelList(data=[])


@pytest.mark.parametrize(
    ("outcomes", "sentence"),
    [
        ((EngineUnreachable("gone"),), "the canary was not answered: gone"),
        ((Overloaded("full"), Overloaded("full"), EngineUnreachable("gone")), "the canary was not answered: gone"),
        ((9.0,), "the canary had no answer within 0.5 s"),
    ],
)
async def test_unanswered_canary_request_counts_as_a_failure_and_not_as_a_mismatch(outcomes, sentence):
    canary = replace(CANARY, deadline_s=0.5)

    async def never(batch):
        raise AssertionError

    findings = await check_canary(canary, Reluctant(*outcomes), Grace(), ["http://a"], published(), never)
    assert findings == CanaryFindings(failed={"http://a": sentence})


async def test_canary_check_reaches_the_context_and_detects_deviations_that_only_long_sequences_have(made):
    lengths = list[int]()

    def twist(completion):
        lengths.append(len(completion.prompt_token_ids or ()))
        return completion if lengths[-1] < 40 else choices(token_logprobs=[-9.0] * 4)(completion)

    canary = replace(CANARY, tokens=4)
    findings = await made.findings(twist, canary=canary)
    assert lengths[1:] == [16, 32, 60] and lengths[0] < 16
    reason = findings.mismatched[made.url]
    assert "after prompts of up to 60 tokens, the worst is" in reason and not findings.worst
    assert made.url in (await made.findings(canary=canary)).worst


@pytest.mark.parametrize("context_length", [2, 20, 35])
async def test_canary_check_needs_no_long_prompt_in_a_short_context(made, context_length):
    findings = await made.findings(canary=replace(CANARY, context_length=context_length))
    assert made.url in findings.worst


def test_canary_request_has_a_different_seed_for_every_version_and_comes_before_all_work():
    first, second = CANARY.request(1), CANARY.request(2)
    assert first.seed != second.seed and first.priority < min(Priority.EVALUATION, Priority.TRAINING)
