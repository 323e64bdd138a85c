"""TRL's arm of `benchmarks/trl.py`: GRPOTrainer on a recipe's model, problems and reward, in a process of its own.

    python -m benchmarks.trl_arm '{"recipe": "tiny", "seed": 0, "steps": 500, "threads": 2, …}'

prints an `ArmResult` as one line of JSON. The clock starts with training and pauses during evaluations.

TRL takes one optimizer step per generation, so its ratio π / μ is 1, and its gradient equals that of the recipe's
`clipped_ratio` or `logprob`. TRL's `loss_type="dr_grpo"` divides the loss by samples x max tokens, the recipe's
aggregation `sequences` by samples x `length` (1 by default). AdamW is invariant to this constant factor, and TRL's
gradient clip is scaled by it. AdamW, learning-rate schedule, group size, samples per step and sampling are the
recipe's. `beta` is 0; dropout, gradient checkpointing, logging and saving are off. One difference remains: a recipe may
replace groups without signal, for which TRL has no setting.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from pipelinerl.config.recipe import RunConfig, load
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.objective import adv, agg, grad1, grad2
from pipelinerl.objective.presets import resolve
from pipelinerl.roles.problems import held_out_problems, training_problems
from pipelinerl.roles.verification import open_verifier
from pipelinerl.types import Problem
from pipelinerl.verifiers.verifier import SampledAnswer

#: Returns one reward per answer, None where the verifier reached no judgement.
Judge = Callable[[Sequence[Problem], Sequence[str]], list[float | None]]
_SCALES = {adv.Scale.NONE: "none", adv.Scale.STD: "group"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmOrder:
    """A recipe to train, by name or path, until a held-out accuracy of `until`; `evaluate=False` only times steps."""

    recipe: str
    seed: int
    steps: int
    threads: int
    until: float = 1.0
    evaluate: bool = True


@dataclass(frozen=True, slots=True)
class ArmResult:
    """Learning curve `points` (step, seconds of training, held-out accuracy), and the seconds at each step's end."""

    points: list[tuple[int, float, float]]
    ends: list[float]


@contextmanager
def judge_of(config: RunConfig) -> Iterator[Judge]:
    """Yield a synchronous function that returns each answer's reward, or None if the recipe's verifier failed."""
    verifiers = {domain.name: open_verifier(domain) for domain in config.domains}

    async def judge(problems: Sequence[Problem], texts: Sequence[str]) -> list[float | None]:
        pairs = zip(problems, texts, strict=True)
        judged = await asyncio.gather(
            *(verifiers[each.domain].judge(each, [SampledAnswer(text)]) for each, text in pairs)
        )
        return [verdict.reward if verdict.outcome.is_judgement else None for ((verdict, _),) in judged]

    with asyncio.Runner() as runner:
        try:
            yield lambda problems, texts: runner.run(judge(problems, texts))
        finally:
            for verifier in verifiers.values():
                runner.run(verifier.close())


@dataclass(slots=True)
class Clock:
    """A clock that counts the seconds of training and can be paused."""

    now: Callable[[], float] = time.perf_counter
    _began: float = 0.0
    _held: float = 0.0

    def start(self) -> None:
        """Start the clock at zero seconds."""
        self._began, self._held = self.now(), 0.0

    def seconds(self) -> float:
        """Return the seconds of training so far, without pauses."""
        return self.now() - self._began - self._held

    def without(self, work: Callable[[], float]) -> float:
        """Do `work` while the clock is paused, and return its result."""
        began = self.now()
        result = work()
        self._held += self.now() - began
        return result


def held_out_accuracy(config: RunConfig, judge: Judge, tokenizer: ChatTokenizer, model: Any) -> float:
    """Sample a greedy answer per held-out problem, in one batch; return the share of judged answers that are right."""
    from benchmarks.torch_step import generate

    wanted = config.evaluation_sets[0]
    source = held_out_problems(config, wanted)[wanted.name]
    problems = [source.problem(index) for index in range(wanted.problems)]
    prompts = [tokenizer.encode_chat(problem.messages) for problem in problems]
    ends, longest = sorted(tokenizer.eos_token_ids), config.evaluation.max_tokens or config.sampling.max_tokens
    training = model.training
    model.eval()
    answers = generate(model, prompts, longest, do_sample=False, eos_token_id=ends, pad_token_id=ends[0])
    model.train(training)
    texts = [tokenizer.decode(until_end(row, ends)) for row in answers.tolist()]
    rewards = [reward for reward in judge(problems, texts) if reward is not None]
    return sum(reward >= 1.0 for reward in rewards) / max(1, len(rewards))


def until_end(token_ids: list[int], ends: Sequence[int]) -> list[int]:
    """Return the tokens before the first of the end tokens `ends`."""
    return token_ids[: next((at for at, token in enumerate(token_ids) if token in ends), len(token_ids))]


def grpo_arguments(config: RunConfig, *, steps: int, folder: str) -> dict[str, Any]:
    """Return GRPOConfig's arguments for a recipe. Raises ValueError if TRL cannot express its objective."""
    sampling = config.sampling
    objective = resolve(config.objective, max_tokens=sampling.max_tokens)
    term, plain = objective.grad1, isinstance(objective.grad2, grad2.NoRegularizer)
    if not (
        plain and isinstance(objective.agg, agg.Sequences) and isinstance(term, grad1.ClippedRatio | grad1.LogProb)
    ):
        raise ValueError(
            "expected an objective that TRL can express (aggregation `sequences`; `clipped_ratio` or `logprob`; no "
            f"second term), got {config.objective!r}"
        )
    length = objective.agg.length
    assert not isinstance(length, agg.Length), "max_tokens resolves the length"
    scale = getattr(objective.adv, "scale", None)
    if scale not in _SCALES:
        raise ValueError(f"expected advantages scaled by {', '.join(_SCALES)}, got {objective.adv!r}")
    bounds = {}
    if isinstance(term, grad1.ClippedRatio):
        bounds = {"epsilon": term.epsilon_low, "epsilon_high": term.epsilon_high}
    return {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": config.training.rollouts_per_step,
        "num_generations": sampling.group_size,
        "max_completion_length": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "learning_rate": config.optimizer.learning_rate,
        "max_grad_norm": config.optimizer.grad_clip * length / sampling.max_tokens,
        "loss_type": "dr_grpo",
        "scale_rewards": _SCALES[scale],
        **bounds,
        "beta": 0.0,
        "num_iterations": 1,
        "seed": config.run.seed,
        "shuffle_dataset": False,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_dropout": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }


def train(order: ArmOrder) -> ArmResult:
    """Run TRL's trainer on the order's recipe, and return its learning curve and step times."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

    torch.set_num_threads(order.threads)
    config = load(order.recipe, [f"run.seed={order.seed}", f"run.steps={order.steps}"])
    trl: Any = importlib.import_module("trl")
    with judge_of(config) as judge, tempfile.TemporaryDirectory() as folder:
        path, clock = config.model.resolved, Clock()
        model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=torch.float32)
        tokenizer = ChatTokenizer.load(path)
        source = training_problems(config)
        problems = [source.problem(index) for index in range(order.steps * config.groups_per_step)]
        points, ends = list[tuple[int, float, float]](), list[float]()

        def reward(completions: list[Any], index: list[int], **_: Any) -> list[float | None]:
            return judge([problems[at] for at in index], [turns[0]["content"] for turns in completions])

        def evaluate(step: int) -> float:
            seconds = clock.seconds() if step else 0.0
            points.append((step, seconds, clock.without(lambda: held_out_accuracy(config, judge, tokenizer, model))))
            return points[-1][2]

        def begin(*_: Any, **__: Any) -> None:
            if order.evaluate:
                evaluate(0)
            clock.start()

        def end_of_step(_: Any, state: Any, control: Any, **__: Any) -> None:
            ends.append(clock.seconds())
            due = order.evaluate and state.global_step % config.evaluation.interval_steps == 0
            if due and evaluate(state.global_step) >= order.until:
                control.should_training_stop = True

        follower: Any = TrainerCallback()
        follower.on_train_begin, follower.on_step_end = begin, end_of_step
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=trl.GRPOConfig(**grpo_arguments(config, steps=order.steps, folder=folder)),
            train_dataset=_dataset(problems),
            processing_class=AutoTokenizer.from_pretrained(path, local_files_only=True),
            callbacks=[follower],
            optimizers=_optimizers(model, config),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return ArmResult(points, ends)


def _dataset(problems: Sequence[Problem]) -> Any:
    datasets: Any = importlib.import_module("datasets")
    prompts = [[{"role": turn.role, "content": turn.content} for turn in problem.messages] for problem in problems]
    return datasets.Dataset.from_dict({"prompt": prompts, "index": list(range(len(problems)))})


def _optimizers(model: Any, config: RunConfig) -> tuple[Any, Any]:
    import torch

    from pipelinerl.roles.trainer_role import loop_settings

    given, schedule = config.optimizer, loop_settings(config).schedule
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=given.learning_rate,
        betas=given.betas,
        eps=given.eps,
        weight_decay=given.weight_decay,
        fused=True,
    )
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.factor)


def quiet() -> None:
    """Turn off network access and messages of TRL and transformers; call this before importing them."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    import warnings

    warnings.simplefilter("ignore")


def main() -> None:
    """Train the order in the first argument; print the result as the last line of the output."""
    quiet()
    result = train(ArmOrder(**json.loads(sys.argv[1])))
    print(json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
