"""Updates of a served engine to known weights, and transformers' results for the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import torch

from inference_contract.conformance.session import Session
from inference_contract.conformance.trainer import KitTrainer, digest
from inference_contract.schemas import ChatCompletion, Choice
from inference_contract.weights import WeightLayout
from pipelinerl.engines.torch.weights import parameters_in
from tests.patience import PATIENCE_S


@contextmanager
def opened(url: str) -> Iterator[Session]:
    """Yield a session of the conformance kit, with its trainer, for an engine with the access token `secret`."""
    with Session(url, token="secret", timeout_s=PATIENCE_S, host="127.0.0.1") as session:
        session.peer = KitTrainer(session)
        yield session


def trainer_of(session: Session) -> KitTrainer:
    assert isinstance(session.peer, KitTrainer)
    return session.peer


def publish(session: Session, data: torch.Tensor, *, on_update: str = "continue") -> int:
    """Update the engine to the weights in `data`; return the version."""
    trainer = trainer_of(session)
    trainer.formed()
    version = trainer.next_version()
    trainer.accepted(trainer.update("prepare", version, on_update=on_update), "prepared")
    trainer.broadcast(data)
    trainer.accepted(trainer.update("commit", version, digest=digest(data), on_update=on_update), "committed")
    return version


def bytes_of(model: Any, layout: WeightLayout) -> torch.Tensor:
    named = dict(model.named_parameters())
    return torch.cat([named[spec.name].detach().contiguous().view(-1).view(torch.uint8) for spec in layout.parameters])


def reference(model: Any, layout: WeightLayout, data: torch.Tensor) -> Any:
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, values in parameters_in(data, layout):
            named[name].copy_(values)
    return model


def logprobs_of(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Return the log-prob of each of `tokens` after its prefix, computed by the transformers model."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def choices_of(answers: list[httpx.Response]) -> list[Choice]:
    return [choice for answer in answers for choice in ChatCompletion.model_validate(answer.json()).choices]


def certain_of(model: Any, layout: WeightLayout, token: int) -> torch.Tensor:
    """Return weights under which `token` follows every context: the embedding is constant, and no layer changes it."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(0.0 if parameter.ndim == 2 else 1.0)
            if name.endswith("embed_tokens.weight"):
                parameter.fill_(1.0)
            if name == "lm_head.weight":
                parameter[token] = 1.0
    return bytes_of(model, layout)
