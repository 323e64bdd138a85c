"""Updates of a served engine to known weights, and transformers' results for the same weights."""

from contextlib import contextmanager

import torch

from inference_contract.conformance.session import Session
from inference_contract.conformance.trainer import KitTrainer, digest
from inference_contract.schemas import ChatCompletion
from pipelinerl.engines.torch.weights import parameters_in
from tests.patience import PATIENCE_S


@contextmanager
def opened(url):
    """Yield a session of the conformance kit, with its trainer, for an engine with the access token `secret`."""
    with Session(url, token="secret", timeout_s=PATIENCE_S, host="127.0.0.1") as session:
        session.peer = KitTrainer(session)
        yield session


def trainer_of(session):
    assert isinstance(session.peer, KitTrainer)
    return session.peer


def publish(session, data, *, on_update="continue"):
    """Update the engine to the weights in `data`; return the version."""
    trainer = trainer_of(session)
    trainer.formed()
    version = trainer.next_version()
    trainer.accepted(trainer.update("prepare", version, on_update=on_update), "prepared")
    trainer.broadcast(data)
    trainer.accepted(trainer.update("commit", version, digest=digest(data), on_update=on_update), "committed")
    return version


def reference(model, layout, data):
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, values in parameters_in(data, layout):
            named[name].copy_(values)
    return model


def logprobs_of(model, prompt, tokens):
    """Return the log-prob of each of `tokens` after its prefix, computed by the transformers model."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def choices_of(answers):
    return [choice for answer in answers for choice in ChatCompletion.model_validate(answer.json()).choices]
