"""Supervised training before RL: `pipelinerl sft` for a recipe's model, `pipelinerl warmstart` for a new small one.

A problem's demonstration is its right answer, `ground_truth`, after the prompt that RL would use. `sft` trains with the
recipe's own trainer, optimizer and packing. Its loss is an objective like any other: every token of a demonstration has
advantage 1. `warmstart` trains a small model until it is partly skilled.

If the recipe has one domain with a single right answer per problem, skill is the share of greedy answers that are
exactly right. If it has several domains, skill is the mean reward of sampled answers, for each domain by its verifier.
"""

from __future__ import annotations

import asyncio
import atexit
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final

import typer

from pipelinerl import rng
from pipelinerl.config import recipe as recipes
from pipelinerl.config.recipe import RunConfig, save
from pipelinerl.data.problems import Split
from pipelinerl.enums import Skill
from pipelinerl.errors import UserError
from pipelinerl.models.checkpoint import save_model
from pipelinerl.models.directory_copy import copy_model_files
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.models.weight_writer import WeightWriter
from pipelinerl.objective.streams import CROSS_ENTROPY
from pipelinerl.plugins.warmstart.tiny_decoder import (
    SPELL_BACKWARD_PHRASE,
    DecoderShape,
    WarmStartProgress,
    WarmStartSettings,
    accuracies,
    char_tokenizer,
    demonstrations_of,
    sampled_answers,
    warm_start,
    word_tokenizer,
)
from pipelinerl.roles.dtypes import with_plain_models
from pipelinerl.roles.problems import demonstrated_problems, problems_of
from pipelinerl.roles.role import Changes, Overrides, joined
from pipelinerl.roles.verification import open_verifier
from pipelinerl.roles.workers import opened_policy
from pipelinerl.system.files import sync
from pipelinerl.system.machine import free_ports
from pipelinerl.system.supervised_process import tied
from pipelinerl.training.batch import BatchRules
from pipelinerl.training.demonstrations import demonstration, imitated
from pipelinerl.training.schedule import LearningRateSchedule
from pipelinerl.types import Problem, RolloutGroup
from pipelinerl.verifiers.verifier import GroupVerifier, SampledAnswer
from trainer_contract.trainer import Trainer

#: Number of problems whose texts are used to train the tokenizer.
_READ: Final = 4000
#: Number of validation problems per domain (`_CHECKED`) and of samples per problem (`_SAMPLES`) at each skill check.
_CHECKED: Final = 24
_SAMPLES: Final = 4
#: Number of validation problems of a check of greedy answers.
_CHECKED_EXACTLY: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartOptions:
    """The model's size, `vocab` word pieces (0: characters), and the band of validation skill in which to stop."""

    hidden: int
    layers: int
    heads: int
    band: tuple[float, float]
    seed: int
    skill: Skill = Skill.EXACT
    vocab: int = 0


def warmstart(
    output: Annotated[Path, typer.Argument(help="Directory to create for the model.")],
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and demonstrations.")] = 0,
    recipe: Annotated[str, typer.Option(help="Recipe whose domains provide the demonstrations.")] = "tiny",
    hidden: Annotated[int, typer.Option(min=1, help="Width of the decoder.")] = 96,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the decoder.")] = 2,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 4,
    vocab: Annotated[int, typer.Option(min=0, help="Tokens to learn from the problems (0: characters).")] = 0,
    skill: Annotated[Skill, typer.Option(help="Measure greedy answers, or rewards by domain.")] = Skill.EXACT,
    at_least: Annotated[float, typer.Option(min=0, max=1, help="Stop at this skill on the validation split.")] = 0.38,
    at_most: Annotated[float, typer.Option(min=0, max=1, help="Fail above it: RL would have too little to do.")] = 0.44,
) -> None:
    """Make a small model with the command line's options."""
    options = WarmStartOptions(
        hidden=hidden, layers=layers, heads=heads, band=(at_least, at_most), seed=seed, skill=skill, vocab=vocab
    )
    make(recipes.load(recipe), options, output=output, say=typer.echo)


def sft(
    recipe: Annotated[str, typer.Argument(help="Recipe whose model is trained, on the right answers of its domains.")],
    output: Annotated[Path, typer.Argument(help="Directory to create for the trained model.")],
    overrides: Overrides = None,
    changes: Changes = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 100,
    demonstrations: Annotated[int, typer.Option(min=1, help="Demonstrations of each step.")] = 64,
) -> None:
    """Fine-tune a model with the command line's options."""
    config = recipes.load(recipe, joined(overrides, changes))
    fine_tune(config, output=output, say=typer.echo, steps=steps, per_step=demonstrations)


def fine_tune(
    config: RunConfig,
    *,
    output: Path,
    say: Callable[[str], None],
    steps: int,
    per_step: int = 64,
    validation: int = 64,
) -> None:
    """Train the recipe's model on `per_step` demonstrations of its domains in each step, and write it to `output`.

    Learning rate and schedule are the recipe's; the schedule runs over `steps`. Demonstrations longer than
    `engine.context_length` are left out. `validation` of them measure the loss.

    Raises:
        UserError: `output` exists or cannot be written, or no demonstration fits.
        ModelError: the model cannot be trained here.
    """
    if output.exists():
        raise UserError(f"{output} exists; name a new directory")
    config = with_plain_models(config)
    tokenizer, most = ChatTokenizer.load(config.model.resolved), config.engine.context_length

    def demonstrations(split: Split, first: int, count: int) -> list[RolloutGroup]:
        drawn = demonstrated_problems(config, split, count=config.groups_per_step)
        return [
            group
            for i in range(first, first + count)
            if (group := demonstration(drawn.problem(i), tokenizer, i)).rollouts[0].num_tokens <= most
        ]

    held_out = demonstrations(Split.VALIDATION, 0, validation)
    if not held_out:
        raise UserError(f"no demonstration has at most engine.context_length = {most} tokens; raise it")
    schedule = LearningRateSchedule(
        warmup_steps=config.optimizer.warmup_steps,
        steps=steps,
        shape=config.optimizer.schedule,
        final_fraction=config.optimizer.final_fraction,
    )
    trainer = opened_policy(_with_ranks(config))
    try:
        writer = WeightWriter.of(config.model.resolved, trainer.weight_layout())
        before = _loss(trainer, held_out, config.trainer.token_budget)
        say(f"validation loss {before:.4f} nats per token before the first step")
        for step in range(steps):
            groups = demonstrations(Split.TRAIN, step * per_step, per_step)
            if not groups:
                continue
            batch = imitated(groups, BatchRules(token_budget=config.trainer.token_budget, width=trainer.width))
            losses = trainer.backward(batch, CROSS_ENTROPY)
            rate = config.optimizer.learning_rate * schedule.factor(step)
            norm = trainer.optimizer_step(learning_rate=rate).grad_norm
            if (step + 1) % max(1, steps // 20) == 0:
                loss = sum(each.loss for each in losses)
                say(f"step {step + 1}: loss {loss:.4f}, gradient norm {norm:.3g}, learning rate {rate:.3g}")
        after = _loss(trainer, held_out, config.trainer.token_budget)
        _save(trainer, writer, config.model.resolved, output)
    finally:
        trainer.close()
    say(f"{output}: validation loss {before:.4f} before, {after:.4f} after {steps} steps")


def _with_ranks(config: RunConfig) -> RunConfig:
    """Start the trainer's other ranks, which end with this process; return the recipe with their meeting point."""
    count = config.trainer_processes
    if count == 1:
        return config
    (port,), folder = free_ports(1), TemporaryDirectory()
    options = {**config.trainer.options, "distributed": {"coordinator": f"127.0.0.1:{port}"}}
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"options": options})})
    save(config, recipe := Path(folder.name) / "recipe.toml")
    start = tied([sys.executable, "-P", "-m", "pipelinerl.cli", "trainer-rank", "--recipe", str(recipe), "--rank"])
    ranks = [subprocess.Popen([*start, str(rank)]) for rank in range(1, count)]

    def reap() -> None:
        for rank in ranks:
            rank.wait()
        folder.cleanup()

    atexit.register(reap)  # rank 0 registers its own function later, so that one runs first
    return config


def _loss(trainer: Trainer, groups: Sequence[RolloutGroup], token_budget: int) -> float:
    batch = imitated(groups, BatchRules(token_budget=token_budget, width=trainer.width))
    total = sum(
        float(logprobs[each.loss_mask].sum()) for each, logprobs in zip(batch, trainer.forward(batch), strict=True)
    )
    return -total / sum(int(each.loss_mask.sum()) for each in batch)


def _save(trainer: Trainer, writer: WeightWriter, model: Path, output: Path) -> None:
    staging = output.with_name(f".{output.name}.part")
    try:
        with ExitStack() as undone:
            staging.mkdir(parents=True)
            undone.callback(shutil.rmtree, staging, ignore_errors=True)
            copy_model_files(model, staging)
            writer.write(staging / "model.safetensors", trainer.gather_weights())
            for file in (each for each in staging.rglob("*") if each.is_file()):
                file.chmod(0o644)  # make the file readable for all: safetensors lets only the owner read it
                sync(file)
            staging.rename(output)
            undone.pop_all()
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror or error}") from None


def make(config: RunConfig, options: WarmStartOptions, *, output: Path, say: Callable[[str], None]) -> None:
    """Train a model on the training split and write it to `output`. Raises UserError."""
    if output.exists():
        raise UserError(f"{output} exists; name a new directory")
    # Problems come in another order than in RL runs, so that RL does not begin with the latest demonstrations.
    seed = rng.key(options.seed, "demonstrations") % 2**31
    tokenizer = _tokenizer(problems_of(config, Split.TRAIN, seed=seed).problem, options.vocab)
    try:
        shape = DecoderShape(
            hidden=options.hidden,
            layers=options.layers,
            heads=options.heads,
            intermediate=2 * options.hidden,
            vocab=tokenizer.vocab_size,
            max_positions=max(64, config.engine.context_length),
        )
    except ValueError as error:
        raise UserError(str(error)) from None
    began = time.monotonic()
    rewards = None if options.skill is Skill.EXACT else _Rewards(config, tokenizer, seed=options.seed)
    if rewards is None:
        validation = problems_of(config, Split.VALIDATION, seed=0).problem
        checked = demonstrations_of([validation(i) for i in range(_CHECKED_EXACTLY)], tokenizer)
        sampled = 0.0

        def skills(model: Any) -> dict[str, float]:
            nonlocal sampled
            greedy, sampled = accuracies(model, checked)
            return {"greedy": greedy}

        fit: dict[str, Any] = {"batch_size": 64, "temperature": 4.0, "learning_rate": 1e-3, "check_every": 2}
        fit |= {"demonstrations": {"greedy": problems_of(config, Split.TRAIN, seed=seed).problem}, "skills": skills}
    else:
        alone = _alone(config).items()
        demonstrations = {name: problems_of(one, Split.TRAIN, seed=seed).problem for name, one in alone}
        fit = {"demonstrations": demonstrations, "skills": rewards.of}

    def shown(progress: WarmStartProgress) -> str:
        if rewards is None:
            return f"validation accuracy {progress.skills['greedy']:.3f} greedy, {sampled:.3f} sampled"
        return ", ".join(
            f"{name} {skill:.3f} after {progress.demonstrations[name]:,} demonstrations"
            for name, skill in progress.skills.items()
        )

    def tell(progress: WarmStartProgress) -> None:
        if rewards is not None or progress.step % 20 == 0:
            say(f"step {progress.step}: {shown(progress)}, loss {progress.loss:.3f}")

    try:
        settings = WarmStartSettings(tokenizer=tokenizer, shape=shape, seed=options.seed, band=options.band, **fit)
        model, last = warm_start(settings, tell)
    finally:
        if rewards is not None:
            rewards.close()
    save_model(model, tokenizer, output)
    if rewards is None:
        greedy, count = last.skills["greedy"], last.demonstrations["greedy"]
        seconds = time.monotonic() - began
        say(f"{output}: {greedy:.3f} greedy validation accuracy after {count:,} demonstrations in {seconds:.0f} s")
    else:
        say(f"{output}: validation reward of sampled answers: {shown(last)}")


def _tokenizer(problem: Callable[[int], Problem], vocab: int) -> ChatTokenizer:
    if vocab:
        texts = (text for i in range(_READ) for text in (problem(i).messages[-1].content, problem(i).ground_truth))
        backend = word_tokenizer(texts, vocab=vocab)
    else:
        backend = char_tokenizer(phrases=(SPELL_BACKWARD_PHRASE,))
    return ChatTokenizer(backend, {backend.eos_token_id})


class _Rewards:
    """Measures the mean reward of sampled answers to a few validation problems per domain; close it after use."""

    def __init__(self, config: RunConfig, tokenizer: ChatTokenizer, *, seed: int) -> None:
        self._domains = {domain.name: domain for domain in config.trained_domains}
        self._most = {name: each.max_tokens or config.sampling.max_tokens for name, each in self._domains.items()}
        mixtures = {name: problems_of(alone, Split.VALIDATION, seed=0) for name, alone in _alone(config).items()}
        self._problems = {name: [each.problem(i) for i in range(_CHECKED)] for name, each in mixtures.items()}
        self._tokenizer = tokenizer
        self._seed = seed
        self._runner = asyncio.Runner()
        self._verifiers: dict[str, GroupVerifier] = {}

    def of(self, model: Any) -> dict[str, float]:
        return {name: self._runner.run(self._reward(model, name)) for name in self._domains}

    def close(self) -> None:
        for verifier in self._verifiers.values():
            self._runner.run(verifier.close())
        self._runner.close()

    async def _reward(self, model: Any, name: str) -> float:
        if name not in self._verifiers:
            self._verifiers[name] = open_verifier(self._domains[name])
        problems = [problem for problem in self._problems[name] for _ in range(_SAMPLES)]
        texts = sampled_answers(model, self._tokenizer, problems, max_tokens=self._most[name], seed=self._seed)
        answers = [SampledAnswer(text) for text in texts]
        groups = [answers[begin : begin + _SAMPLES] for begin in range(0, len(answers), _SAMPLES)]
        verifier = self._verifiers[name]
        judged = await asyncio.gather(*map(verifier.judge, self._problems[name], groups))
        verdicts = [each.verdict for group in judged for each in group]
        for verdict in verdicts:
            if not verdict.outcome.is_judgement:
                raise UserError(f"domains.{name}: an answer could not be judged: {verdict.reason}")
        return fmean(verdict.reward for verdict in verdicts)


def _alone(config: RunConfig) -> dict[str, RunConfig]:
    return {domain.name: config.model_copy(update={"domains": (domain,)}) for domain in config.trained_domains}
