"""Measure how much of each update survives rounding to bfloat16: `python -m benchmarks.rounding RUN`.

RUN is a run of `examples/smollm2/json_facts.toml` with float32 engines and every checkpoint kept:

    pipelinerl run examples/smollm2/json_facts.toml run.steps=4 checkpoint.interval_steps=1 checkpoint.keep=5

Each checkpoint is rounded in four ways. The rounded model reads reference answers of the task in fp32 arithmetic.

    nearest    the plain cast
    dithered   a fixed threshold per weight (`numerics/dither.py`)
    redrawn    the same, with new thresholds in each version
    feedback   to the nearest, with the remainder added to the next version

`learned` is the share of the log-likelihood gained so far that the rounded model shows. `seen` is that of the weights'
movement (⟨Δrounded, Δ⟩ ÷ ⟨Δ, Δ⟩). P95 is that of |Δ log-prob| of a token between the fp32 model and the rounded one.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

import torch
from safetensors.torch import load_file
from torch import Tensor

from pipelinerl.config.recipe import RunConfig, load_run
from pipelinerl.models.checkpoint import load_model
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.numerics.dither_torch import dithered
from pipelinerl.roles.wiring import held_out_problems
from trainer_contract.types import WeightDType

PROBLEMS: Final = 24
Weights = Mapping[str, Tensor]


@final
class Rounded:
    """Rounded weights of consecutive versions, in each of the four ways."""

    def __init__(self) -> None:
        self._left_out: dict[str, Tensor] = {}

    def ways(self, weights: Weights, version: int) -> dict[str, dict[str, Tensor]]:
        """Return the rounded weights as fp32, by way."""
        fed = {name: each + self._left_out.get(name, 0.0) for name, each in weights.items()}
        feedback = {name: each.bfloat16().float() for name, each in fed.items()}
        self._left_out = {name: fed[name] - feedback[name] for name in weights}
        return {
            "nearest": {name: each.bfloat16().float() for name, each in weights.items()},
            "dithered": {name: dithered(each, name=name).float() for name, each in weights.items()},
            "redrawn": {name: dithered(each, name=f"{name}/{version}").float() for name, each in weights.items()},
            "feedback": feedback,
        }


def sequences(config: RunConfig, tokenizer: ChatTokenizer) -> list[tuple[list[int], list[int]]]:
    """Return (prompt, reference answer) of held-out problems, as tokens."""
    mixture = next(iter(held_out_problems(config).values()))
    problems = [mixture.problem(number) for number in range(PROBLEMS)]
    end = sorted(tokenizer.eos_token_ids)[:1]
    return [(tokenizer.encode_chat(each.messages), tokenizer.encode(each.ground_truth) + end) for each in problems]


@torch.no_grad()
def logprobs(model: Any, pairs: Sequence[tuple[list[int], list[int]]]) -> Tensor:
    """Return the log-probs of all answer tokens, f32 [N]."""
    parts = []
    for prompt, answer in pairs:
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        parts.append(logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0])
    return torch.cat(parts)


def seen(rounded: Weights, weights: Weights, first: Weights) -> float:
    """Return ⟨Δrounded, Δ⟩ ÷ ⟨Δ, Δ⟩ since the first version."""
    moved = {name: weights[name] - first[name] for name in weights}
    shown = sum(float(((rounded[name] - first[name]) * each).sum(dtype=torch.float64)) for name, each in moved.items())
    return shown / sum(float((each * each).sum(dtype=torch.float64)) for each in moved.values())


def measure(run_dir: Path) -> None:
    """Print a line per checkpoint and way."""
    config = load_run(run_dir)
    model = load_model(config.model.resolved, dtype=WeightDType.FLOAT32).eval()
    pairs = sequences(config, ChatTokenizer.load(config.model.resolved))
    parameters = dict(model.named_parameters())
    first = {name: each.detach().clone() for name, each in parameters.items()}
    before, rounded = logprobs(model, pairs), Rounded()

    def read(weights: Weights) -> Tensor:
        with torch.no_grad():
            for name, each in parameters.items():
                each.copy_(weights[name])
        return logprobs(model, pairs)

    print("version  rounding   learned    seen      P95")
    for folder in sorted((run_dir / "checkpoints").glob("step-*")):
        version = int(folder.name.removeprefix("step-"))
        stored = load_file(folder / "model.safetensors")
        weights = {name: stored[name].float() for name in parameters}
        exact = read(weights)
        for way, values in rounded.ways(weights, version).items():
            got = read(values)
            learned = float((got - before).mean() / (exact - before).mean())
            p95 = float((got - exact).abs().quantile(0.95))
            print(f"{version:7}  {way:9} {learned:8.0%} {seen(values, weights, first):7.0%} {p95:8.4f}", flush=True)


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="directory of the run")
    measure(parser.parse_args().run)


if __name__ == "__main__":
    main()
