"""`pipelinerl warmstart`: a small model, fitted to demonstrations of a recipe's domains until it has partial skill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipelinerl import rng
from pipelinerl.config.recipe import RunConfig
from pipelinerl.data.problems import Split
from pipelinerl.errors import UserError
from pipelinerl.models.checkpoint import save_model
from pipelinerl.models.tiny_decoder import SPELL_BACKWARD_PHRASE, DecoderShape, char_tokenizer
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.models.warmstart import WarmStartProgress, WarmStartSettings, warm_start
from pipelinerl.roles.wiring import problems_of


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartOptions:
    """The model's size and the band of greedy validation accuracy in which to stop."""

    hidden: int
    layers: int
    heads: int
    accuracy: tuple[float, float]
    seed: int


def make(config: RunConfig, options: WarmStartOptions, *, output: Path, say: Callable[[str], None]) -> None:
    """Fit a model on the training split and write it to `output`; the held-out split is never read.

    Raises:
        UserError: `output` exists, the shape is impossible, or the band was missed.
    """
    if output.exists():
        raise UserError(f"{output} exists; name a directory to be made")
    backend = char_tokenizer(phrases=(SPELL_BACKWARD_PHRASE,))
    tokenizer = ChatTokenizer(backend, {backend.eos_token_id})
    try:
        shape = DecoderShape(
            hidden=options.hidden,
            layers=options.layers,
            heads=options.heads,
            intermediate=2 * options.hidden,
            vocab=tokenizer.vocab_size,
        )
    except ValueError as error:
        raise UserError(str(error)) from None
    settings = WarmStartSettings(
        # Another order of problems than any run's, so that RL does not begin with what was just demonstrated.
        training_problem=problems_of(config, Split.TRAIN, seed=rng.key(options.seed, "demonstrations") % 2**31).problem,
        validation_problem=problems_of(config, Split.VALIDATION, seed=0).problem,
        tokenizer=tokenizer,
        shape=shape,
        seed=options.seed,
        accuracy=options.accuracy,
    )

    def tell(progress: WarmStartProgress) -> None:
        if progress.step % 20 == 0:
            say(
                f"step {progress.step}: validation accuracy {progress.greedy_accuracy:.3f} greedy, "
                f"{progress.sampled_accuracy:.3f} sampled, loss {progress.loss:.3f}"
            )

    report = warm_start(settings, tell)
    save_model(report.model, tokenizer, output)
    say(
        f"{output}: {report.greedy_accuracy:.3f} greedy validation accuracy after {report.demonstrations:,} "
        f"demonstrations in {report.seconds:.0f} s"
    )
