"""Checkpoints of a bigram model whose weights, trainer state and ledger each reveal their version number."""

import numpy as np

from pipelinerl.plugins.bigram.model import BigramModel
from pipelinerl.training.checkpoints.manifest import TrainingState
from trainer_contract.types import ParameterInfo

SIZE = 5
LAYOUT = [ParameterInfo("bigram.logits", (SIZE, SIZE), "float32")]


def weights_of(version):
    """Return weights whose values are the version number."""
    return [("bigram.logits", np.full((SIZE, SIZE), version, np.float32))]


def model_directory(path):
    """Create a model directory that also has a file of other weights, which checkpoints must not copy."""
    BigramModel.random(SIZE, seed=0).save(path)
    (path / "tokenizer.json").write_text("{}")
    (path / "pytorch_model.bin").write_text("other weights that must not be copied")
    return path


def state_of(version, *, epoch=1, accuracies=None):
    """Return the training state of a version; `accuracies` maps the versions of past evaluations to their results."""
    results = [{"model_version": at, "accuracy": value, "at_least": value} for at, value in (accuracies or {}).items()]
    return TrainingState(
        model_version=version,
        epoch=epoch,
        offsets={"identity": "x", "rollouts:actor-0": f"{version}-0"},
        ledger={"frontier": version, "beyond": [version + 2], "counts": {"trained": version}},
        controller={"epoch": epoch, "knobs": {"k": "inf"}, "evaluations": results},
    )


def capture(store, state, *, padding=0):
    """Capture a checkpoint whose values are the version number; `padding` adds bytes to the trainer state."""
    number = state.model_version
    record = number.to_bytes(8, "little") * (2 + padding // 8)
    return store.capture(
        state,
        layout=LAYOUT,
        weights=weights_of(number),
        parts={"trainer": lambda path: (path / "optimizer").write_bytes(record) and None},
    )


def save(store, version, *, padding=0, **rest):
    return store.commit(capture(store, state_of(version, **rest), padding=padding))


def versions_in(path, state):
    """Return the versions found in a checkpoint's weights and states; more than one shows that versions were mixed."""
    record = np.frombuffer((path / "trainer" / "optimizer").read_bytes(), np.uint64)
    weights = BigramModel.load(path).logits
    ledger = state.ledger["frontier"], int(state.offsets["rollouts:actor-0"].split("-")[0])
    return {state.model_version, *ledger, *map(int, np.unique(record)), *map(int, np.unique(weights))}
