"""Rank 0 of a JAX trainer in its own process, driven by a test: `… -m tests.fakes.jax_rank0 MODEL PORT DIR WHAT`.

WHAT is a list of jobs. `results` writes the results of the trainer's methods to DIR, and `kit` those of the conformance
kit's checks. `wait`, always the last job, reports that it is ready, and runs forward passes until one fails.
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from pipelinerl.objective.presets import resolve
from pipelinerl.plugins.jax.trainer.trainer import JaxTrainer
from trainer_contract.conformance import Status, run
from trainer_contract.conformance.probes import TrainerUnderTest, pack, rollouts_of
from trainer_contract.errors import NonFiniteError, TrainerError
from trainer_contract.host_weights import copied
from trainer_contract.types import Device, OptimizerSpec, TrainerSpec

VOCAB = 48
RATE = 1.0
OBJECTIVE = resolve("grpo")
#: With eps = 1 the first step is g / (|g| + 1), so the change of the weights reveals the gradient g.
OPTIMIZER = OptimizerSpec(eps=1.0, grad_clip=0.0)


def batches():
    rollouts = rollouts_of(VOCAB)
    return [pack(rollouts[:3], temperature=0.7), pack(rollouts[3:])]


def started(model, options, **fields):
    trainer = JaxTrainer()
    trainer.init_worker(
        TrainerSpec(model_path=Path(model), device=Device.CPU, optimizer=OPTIMIZER, options=options, **fields)
    )
    return trainer


def one_step(trainer):
    losses = [trainer.backward([batch], OBJECTIVE)[0] for batch in batches()]
    norm = trainer.optimizer_step(learning_rate=RATE).grad_norm
    weights = {name: array.copy() for name, array in trainer.gather_weights()}
    return {
        "losses": np.array([loss.loss for loss in losses]),
        "predictions": np.concatenate([loss.predictions for loss in losses]),
        "norm": np.array(norm),
        **weights,
    }


def results(model, options, directory):
    """Take a step, save the state, take another step; then run a pass with given weights and try an invalid step."""
    trainer = started(model, options)
    np.savez(directory / "first.npz", **one_step(trainer))
    (directory / "state").mkdir()
    trainer.save_state(directory / "state")
    before, held = trainer.forward([batches()[0]])[0], copied(trainer.gather_weights())
    np.savez(directory / "second.npz", **one_step(trainer))
    again = trainer.forward_at([batches()[0]], held)[0]
    moved = trainer.forward([batches()[0]])[0]
    refused = refusal_of(trainer, spoilt(batches()[0]))
    together = moved.tobytes() == trainer.forward([batches()[0]])[0].tobytes()
    trainer.close()
    exact = before.tobytes() == again.tobytes() != moved.tobytes()
    (directory / "forward_at.json").write_text(json.dumps(exact))
    (directory / "refusal.json").write_text(json.dumps([refused, together]))


def spoilt(batch):
    advantages = batch.advantages.copy()
    advantages[np.flatnonzero(batch.loss_mask)[0]] = np.nan
    return replace(batch, advantages=advantages)


def refusal_of(trainer, batch):
    try:
        with np.errstate(invalid="ignore"):
            trainer.backward([batch], OBJECTIVE)
    except NonFiniteError as error:
        return str(error)
    return "it was taken"


def kit(model, options, directory):
    spec = TrainerSpec(model_path=Path(model), device=Device.CPU, options=options)
    found = run(TrainerUnderTest(JaxTrainer, spec, VOCAB), directory=directory / "kit")
    (directory / "kit.json").write_text(
        json.dumps({each.name: each.reason if each.status is not Status.PASSED else "" for each in found})
    )


def until_lost(model, options):
    trainer, batch = started(model, options), batches()[0]
    trainer.forward([batch])
    print("ready", flush=True)
    try:
        while True:
            trainer.forward([batch])
            time.sleep(0.05)
    except TrainerError as error:
        print(f"{type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    model, port, directory, *what = sys.argv[1:]
    distributed = {"coordinator": f"127.0.0.1:{port}", "processes": 2, "timeout_s": 240, "silence_s": 5}
    options = {"mesh": {"fsdp": 2}, "distributed": distributed}
    if "results" in what:
        results(model, options, Path(directory))
    if "kit" in what:
        kit(model, options, Path(directory))
    if "wait" in what:
        until_lost(model, options)
