"""Rows of a torch runner: a test starts them, decodes them, and reads the tokens and log-probs that they sampled."""

from dataclasses import dataclass, field

import torch

from pipelinerl.engines.batching.model_runner import Prefill, RowState


@dataclass
class Row:
    prompt: list[int]
    temperature: float = 1.0
    noise_key: int = 0
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def tokens(self):
        return self.prompt + self.sampled

    def state(self, row):
        given = {"top_p": 1.0, "top_k": 0, "num_sampled": len(self.sampled)}
        return RowState(row, self.tokens[-1], len(self.tokens) - 1, self.noise_key, self.temperature, **given)


def place(runner, rows, at=0):
    runner.place([row.state(index) for index, row in enumerate(rows, start=at)])


def start(runner, rows, at=0):
    prefills = [Prefill(row.tokens[:-1], [at + i]) for i, row in enumerate(rows) if len(row.tokens) > 1]
    runner.prefill(prefills)
    place(runner, rows, at)


def decode(runner, rows, steps):
    for _ in range(steps):
        for row, token, logprob in zip(rows, *runner.decode(len(rows)), strict=True):
            row.sampled.append(token)
            row.logprobs.append(logprob)


def prefilled(runner, prefills):
    """Run prefills; return (number of prompts, tokens per prompt) for each forward pass that they needed."""
    forward, shapes = runner._forward, []

    class Counting:
        logits = forward.logits

        def fill(self, token_ids, *rest):
            shapes.append(tuple(token_ids.shape))
            forward.fill(token_ids, *rest)

    runner._forward = Counting()
    runner.prefill(prefills)
    runner._forward = forward
    return shapes


def bytes_of(model):
    return torch.cat([each.detach().contiguous().view(-1).view(torch.uint8) for each in model.parameters()])


def swap(runner, sent):
    """Serve other weights: bytes, or one value for every byte."""
    runner.staging()[:] = sent
    runner.finish_staging()
    runner.swap()
