"""Rank 0 of a torch trainer of several processes, driven by a test: `… -m tests.fakes.torch_rank0 JOBS`.

JOBS is a JSON list of jobs (directory, name of a function in this module, its keyword arguments), run in order.
Each job writes its result to found.json in its directory, and arrays to *.npz. `until_lost` reports that it is ready,
runs until a rank is lost, and prints the error.
"""

import json
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from pipelinerl import rng
from pipelinerl.models.weight_writer import WeightWriter
from pipelinerl.objective.presets import resolve
from pipelinerl.trainers.torch.trainer import TorchTrainer
from pipelinerl.training.batch import MiniBatching
from pipelinerl.training.passes import ForwardPasses
from tests.fakes.batches import batch_of, step_on
from tests.fakes.rollouts import group, rollout
from trainer_contract.conformance import CHECKS, VALUE_CHECKS, Status, run
from trainer_contract.conformance.probes import TrainerUnderTest, pack, rollouts_of
from trainer_contract.errors import StateError, TrainerError
from trainer_contract.host_weights import copied
from trainer_contract.types import Device, Head, OptimizerSpec, Precision, Rounding, TrainerSpec, WeightDType

VOCAB = 48
OBJECTIVE = resolve("grpo")
#: An objective that clips the ratio to the policy at the start of the batch. The bounds are narrow, so later optimizer
#: steps of the batch reach them.
CLIPPED = resolve({"preset": "grpo", "grad1": {"over": "old", "epsilon_low": 0.02, "epsilon_high": 0.02}})


def spec_of(model, options, **fields):
    return TrainerSpec(model_path=Path(model), device=Device.CPU, options=options, **fields)


def kit(directory, *, models, options, names=None):
    """Run the conformance kit for each model and head; return the reason of each failed check, "" for passed ones."""
    found = {}
    for model, head in models:
        suite = CHECKS if head == "policy" else VALUE_CHECKS
        checks = suite if names is None else [check for check in suite if check.__name__ in names]
        subject = TrainerUnderTest(TorchTrainer, spec_of(model, options, head=Head(head)), VOCAB)
        results = run(subject, directory=directory / "kit" / Path(model).name / head, checks=checks)
        found[f"{Path(model).name} {head}"] = {
            each.name: each.reason if each.status is not Status.PASSED else "" for each in results
        }
    return found


def batches(step, parts):
    """Return the micro-batches of a step, `parts` of them; the rollouts depend on the number of the step."""
    rollouts = [[(token + step) % VOCAB for token in one] for one in rollouts_of(VOCAB)]
    return [pack(rollouts[part::parts], prompt=2, temperature=0.7) for part in range(parts)]


def steps(trainer, *, first, count, parts):
    """Run `count` training steps on fixed data from step `first`; return losses, gradient norms and predictions."""
    found = {"losses": [], "norms": [], "predictions": []}
    for step in range(first, first + count):
        losses = trainer.backward(batches(step, parts), OBJECTIVE)
        found["losses"].append(sum(loss.loss for loss in losses))
        found["predictions"].append(np.concatenate([loss.predictions for loss in losses]))
        found["norms"].append(trainer.optimizer_step(learning_rate=1e-3).grad_norm)
    return {name: np.array(values) for name, values in found.items()}


def weights_of(trainer):
    return {name: array.numpy(force=True).copy() for name, array in trainer.gather_weights()}


def gradient(trainer, *, parts):
    """Return the gradient, computed from the weight change of an optimizer step with eps = 1 and no clipping."""
    before = weights_of(trainer)
    trainer.backward(batches(0, parts), OBJECTIVE)
    trainer.optimizer_step(learning_rate=1.0)
    moved = {name: before[name].astype(np.float64) - after for name, after in weights_of(trainer).items()}
    return {name: move / (1.0 - np.abs(move)) for name, move in moved.items()}


def train(
    directory, *, model, options, first=0, count=20, parts=5, restore_from=None, checkpointing=False, precision="fp32"
):
    """Run training steps on fixed data; save their results, the state, the weights, and the loss of the next step."""
    trainer = TorchTrainer()
    restored = None if restore_from is None else Path(restore_from)
    fields = {"gradient_checkpointing": checkpointing, "precision": Precision(precision)}
    trainer.init_worker(spec_of(model, options, restore_from=restored, **fields))
    taken = steps(trainer, first=first, count=count, parts=parts)
    np.savez(directory / "weights.npz", **weights_of(trainer))
    (directory / "state").mkdir()
    trainer.save_state(directory / "state")
    taken["next"] = np.array([loss.loss for loss in trainer.backward(batches(first + count, parts), OBJECTIVE)])
    np.savez(directory / "steps.npz", **taken)
    trainer.close()
    return {"version": first + count}


def served(directory, *, model, options):
    """Step twice with dithered weights; return whether `forward` and `forward_at` with the weights give equal bits."""
    trainer = TorchTrainer()
    trainer.init_worker(spec_of(model, options, gather_dtype=WeightDType.BFLOAT16, rounding=Rounding.DITHERED))
    steps(trainer, first=0, count=2, parts=2)
    ahead, held = batches(2, 2), copied(trainer.gather_weights())
    pairs = list(zip(trainer.forward(ahead), trainer.forward_at(ahead, held), strict=True))
    np.savez(directory / "served.npz", predictions=np.concatenate([ours for ours, _ in pairs]))
    trainer.close()
    return [ours.tobytes() == theirs.tobytes() for ours, theirs in pairs]


def train_alone(directory, *, options, **given):
    """Run `train` in this process alone, while the other ranks wait."""
    return train(directory, options={}, **given)


def begin(directory, *, models, options):
    for model, head in models:
        trainer = TorchTrainer()
        trainer.init_worker(spec_of(model, options, head=Head(head)))
        np.savez(directory / f"{Path(model).name}_{head}.npz", **weights_of(trainer))
        trainer.close()
    return {}


def refused(directory, *, model, options, restore_from):
    """Truncate the last shard of a saved state; return the error with which the trainer rejects that state."""
    state = shutil.copytree(restore_from, directory / "state")
    shard = max((state / "shards").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    try:
        TorchTrainer().init_worker(spec_of(model, options, restore_from=state))
    except StateError as error:
        return {"error": str(error)}
    return {"error": ""}


def resave(directory, *, model, options, restore_from):
    trainer = TorchTrainer()
    trainer.init_worker(spec_of(model, options, restore_from=Path(restore_from)))
    (directory / "state").mkdir(parents=True)
    trainer.save_state(directory / "state")
    trainer.close()
    return {}


def show(directory, *, model, options, parts=5):
    trainer = TorchTrainer()
    trainer.init_worker(replace(spec_of(model, options), optimizer=OptimizerSpec(eps=1.0, grad_clip=0.0)))
    np.savez(directory / "gradient.npz", **gradient(trainer, parts=parts))
    trainer.close()
    return {}


def groups(number):
    """Return seven groups of three rollouts of different lengths; each `number` gives other rollouts."""
    draw, made = rng.generator(number, "mesh_epochs"), []
    for index in range(7):
        prompt = draw.integers(1, VOCAB, int(draw.integers(2, 5))).tolist()
        rollouts = [
            rollout(reward=reward, prompt=prompt, sampled=draw.integers(1, VOCAB, int(draw.integers(1, 9))).tolist())
            for reward in (0.0, 1.0, float(draw.uniform()))
        ]
        made.append(replace(group(index), rollouts=tuple(rollouts)))
    return made


def epochs(directory, *, model, options, batches=3):
    """Train on batches of six optimizer steps each; save the results of each optimizer step, and the final weights."""
    trainer, metrics = TorchTrainer(), []
    trainer.init_worker(replace(spec_of(model, options), optimizer=OptimizerSpec(eps=1e-3)))
    step, mini_batching = (step_on(ForwardPasses(policy=trainer)), MiniBatching(epochs=2, mini_batches=3, seed=11))
    for number in range(1, batches + 1):
        batch = batch_of(
            groups(number), CLIPPED, producing=number, token_budget=48, mini_batching=mini_batching, width=trainer.width
        )
        taken = step.apply(step.accumulate(batch), learning_rates=[1e-2] * mini_batching.updates)
        metrics += [(each["loss"], each["grad_norm"], each["clip_fraction"]) for each in taken.updates]
    losses, norms, clipped = np.transpose(metrics)
    np.savez(directory / "epochs.npz", losses=losses, norms=norms, clipped=clipped)
    np.savez(directory / "weights.npz", **weights_of(trainer))
    trainer.close()
    return {"steps": len(metrics)}


def mixture(directory, *, model, options, count=2):
    """Train a mixture of experts with replayed routing; also save the log-probs of the last batch without replay."""
    trainer, found = TorchTrainer(), {"losses": [], "predictions": []}
    trainer.init_worker(spec_of(model, options))
    for step in range(count):
        plain = batches(step, 3)
        routed = [replace(each, routed_experts=_routing(each, step, number)) for number, each in enumerate(plain)]
        losses = trainer.backward(routed, OBJECTIVE)
        found["losses"].append(sum(loss.loss for loss in losses))
        found["predictions"].append(np.concatenate([loss.predictions for loss in losses]))
        trainer.optimizer_step(learning_rate=1e-3)
    found["free"] = np.concatenate(trainer.forward(plain))
    np.savez(directory / "mixture.npz", **{name: np.array(values) for name, values in found.items()})
    np.savez(directory / "weights.npz", **weights_of(trainer))
    writer = WeightWriter.of(Path(model), trainer.weight_layout())
    writer.write(directory / "model.safetensors", trainer.gather_weights())
    trainer.close()
    return {}


def _routing(batch, step, number):
    draw = rng.generator(step, "mixture", number)
    experts = np.tile(np.arange(4, dtype=np.uint8), (batch.num_tokens, 2, 1))
    return draw.permuted(experts, axis=2)[:, :, :2].copy()


def until_lost(directory, *, model, options):
    trainer = TorchTrainer()
    trainer.init_worker(spec_of(model, options))
    trainer.forward(batches(0, 3))
    print("ready", flush=True)
    try:
        while True:
            trainer.backward(batches(0, 3), OBJECTIVE)
            trainer.discard_gradient()
            time.sleep(0.01)
    except TrainerError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    return {}


if __name__ == "__main__":
    for directory, what, arguments in json.loads(sys.argv[1]):
        Path(directory).mkdir(parents=True, exist_ok=True)
        (Path(directory) / "found.json").write_text(json.dumps(globals()[what](Path(directory), **arguments)))
