"""Survey of what the product supports of each family of the zoo, measured against transformers on one CPU in float32.

    python -m tests.families.survey [FAMILY …]     measure all families, or some; write records, page and README
    python -m tests.families.survey --cuda [FAMILY …]     measure them on a GPU; print what differs from the records
    python -m tests.families.survey --cpu [FAMILY …]      the same on this CPU, with another transformers

A record has a verdict for each use: `yes`, the sentence with which the product refuses, or what went wrong. The page
(`models_page`) says what each `yes` has shown. On a GPU, the JAX trainer is left out.
"""

import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto import modeling_auto
from transformers.utils import logging

from pipelinerl.engines.memory_budget import budget_of
from pipelinerl.engines.options import EngineOptions
from pipelinerl.engines.torch.engine import load_runner
from pipelinerl.errors import PipelineError
from pipelinerl.models.checkpoint import model_type, stored_tensors, weight_files
from pipelinerl.models.directory_copy import copy_model_files
from pipelinerl.models.model_shape import read_shape
from pipelinerl.models.weight_writer import WeightWriter
from pipelinerl.plugins.jax.trainer.trainer import JaxTrainer
from pipelinerl.trainers.torch.trainer import TorchTrainer
from tests.fakes.torch_rows import Row, decode, start, swap
from tests.families import zoo
from tests.families.models_page import Records, cell
from trainer_contract.conformance.probes import LINEAR
from trainer_contract.errors import TrainerError
from trainer_contract.types import Device, MicroBatch, OptimizerSpec, Precision, TrainerSpec, WeightDType

#: Largest difference of two log-probs, in nats, and relative difference of two gradient norms, that rounding explains.
TOLERANCE: Final = 1e-3
F32, BF16 = WeightDType.FLOAT32, Precision.BF16
#: Largest error of log-probs in bf16, as a multiple of transformers' own.
MOST_IN_BF16: Final = 1.2
TEXT: Final = list(range(20, 50))
_LENGTHS: Final = (30, 5, 18, 30, 2)


class WrongError(AssertionError):
    """A result that is not transformers'."""


def sequences():
    """Return token sequences; the last but one shares its beginning with the first."""
    draw = np.random.default_rng(0)
    rows = [draw.integers(12, zoo.VOCAB - 4, length).tolist() for length in _LENGTHS]
    rows[3][:12] = rows[0][:12]
    return rows


def batch_of(rows):
    """Pack sequences into one micro-batch with random advantages from the fourth token of each on."""
    positions = np.concatenate([np.arange(len(row), dtype=np.int32) for row in rows])
    mask, draw = positions >= 3, np.random.default_rng(1)

    def inside(values):
        return np.where(mask, values, 0).astype(np.float32)

    return MicroBatch(
        token_ids=np.concatenate(rows).astype(np.int32),
        position_ids=positions,
        segment_ids=np.repeat(np.arange(len(rows)), [len(row) for row in rows]).astype(np.int32),
        loss_mask=mask,
        advantages=inside(draw.normal(size=len(mask))),
        weights=inside(0.05),
        behavior_logprobs=inside(-5.0),
        temperatures=np.ones(len(mask), np.float32),
        num_segments=len(rows),
    )


def logprobs(model, row):
    """Return f32 [tokens − 1] by transformers: the log-probs of all tokens of a sequence but its first."""
    tokens = torch.tensor([row], device=model.device)
    predicted = model(input_ids=tokens, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return predicted.gather(1, tokens[0, 1:, None])[:, 0]


def expected(model, rows):
    """Return what a trainer must predict for the packed rows: log-probs, and 0 at the start of each."""
    with torch.no_grad():
        return np.concatenate([np.append(0.0, logprobs(model, row).cpu().numpy()) for row in rows])


def same(what, got, wanted):
    """Raise WrongError unless two arrays of log-probs agree."""
    difference = float(np.abs(np.asarray(got, np.float64) - np.asarray(wanted, np.float64)).max())
    if not difference <= TOLERANCE:
        raise WrongError(f"{what} differ by {difference:.1g} nats")


def trainer_of(path, device, **named):
    trainer = TorchTrainer()
    trainer.init_worker(TrainerSpec(model_path=path, device=device, optimizer=OptimizerSpec(), **named))
    return trainer


def step(trainer, batch):
    """Take one optimizer step, large enough to change log-probs, and return the gradient's norm."""
    trainer.backward([batch], LINEAR)
    return trainer.optimizer_step(learning_rate=3e-2).grad_norm


def save(trainer, model, path):
    """Write a checkpoint's model files as `CheckpointStore` does."""
    path.mkdir()
    copy_model_files(model, path)
    WeightWriter.of(model, trainer.weight_layout()).write(path / "model.safetensors", trainer.gather_weights())
    return path


def tensors_in(path):
    """Return dtype and shape of each tensor in a model directory, by name."""
    files = map(stored_tensors, weight_files(path))
    return {name: (tensor.dtype, tensor.shape) for file in files for name, tensor in file.items()}


def loaded(path):
    """Return transformers' model; raise WrongError if it misses a tensor or fills one in."""
    sees = model_type(path) not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    factory: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    model, report = factory.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    if report["missing_keys"] or report["mismatched_keys"]:
        raise WrongError(f"transformers finds no value for {sorted(report['missing_keys'])[:1]}")
    return model.eval()


def _check_gradient(model, rows, batch, norm):
    factors = torch.from_numpy(batch.weights * batch.advantages).split([len(row) for row in rows])
    loss = -sum((logprobs(model, row) * each[1:]).sum() for row, each in zip(rows, factors, strict=True))
    loss.backward()
    squares = [parameter.grad.double().square().sum() for parameter in model.parameters() if parameter.grad is not None]
    wanted = float(torch.stack(squares).sum().sqrt())
    if abs(norm - wanted) > TOLERANCE * wanted:
        raise WrongError(f"the gradient's norm is {norm:.4g}, and transformers' is {wanted:.4g}")


def _check_checkpoint(trainer, model, rows, path, device):
    saved = save(trainer, model, path)
    if tensors_in(saved) != tensors_in(model):
        names = {*tensors_in(saved).items()} ^ {*tensors_in(model).items()}
        raise WrongError(f"{len(names)} tensors have another name, shape or dtype, first {min(names)[0]}")
    own = trainer.forward([batch_of(rows)])[0]
    same("log-probs of the checkpoint", expected(loaded(saved), rows), own)
    (state := path.with_name("state")).mkdir()
    trainer.save_state(state)
    resumed = trainer_of(model, device, restore_from=state)
    same("log-probs of a resumed trainer", resumed.forward([batch_of(rows)])[0], own)


def _sampled(runner, rows, count=6):
    """Sample `count` tokens after each row; return the whole sequences, and the new tokens' log-probs."""
    answers = [Row(row, noise_key=5 + slot) for slot, row in enumerate(rows)]
    start(runner, answers)
    decode(runner, answers, count)
    return [(answer.tokens, answer.logprobs) for answer in answers]


def runner_of(path, device, *, slots=8, dtype=F32):
    sizes = {"slots": slots, "max_waiting": 8, "context_length": 64, "threads": 1}
    return load_runner(EngineOptions(model_path=path, model_id="m", device=device, dtype=dtype, **sizes))


def _check_engine(path, model, trainer, rows, device):
    runner = runner_of(path, device)
    predicted = budget_of(read_shape(path), dtype=F32, wire=F32, slots=8, context=64, received=0)
    if abs(predicted.cache + predicted.states - runner.cache_bytes) > 0.1 * runner.cache_bytes:
        raise WrongError(f"the cache has {runner.cache_bytes} bytes, and the prediction is {predicted.cache}")
    for answer, values in _sampled(runner, rows):
        same("log-probs of sampled tokens", values, expected(model, [answer])[-6:])
    if trainer is None:
        return
    layouts = [
        [(each.name, tuple(each.shape)) for each in its] for its in (runner.layout.parameters, trainer.weight_layout())
    ]
    if layouts[0] != layouts[1]:
        raise WrongError("the engine rejects the trainer's updates: their layouts differ")
    sent = [weight.detach().contiguous().view(-1).view(torch.uint8) for _, weight in trainer.gather_weights()]
    swap(runner, torch.cat(sent))
    after = trainer.forward([batch_of(rows)])[0]
    same("log-probs after an update", np.concatenate([runner.scorer(row, 1.0) for row in rows]), after)


def _check_lora(path, rows, target, device):
    adapted = trainer_of(path, device, options={"lora": {"rank": 4}})
    step(adapted, batch_of(rows))
    merged = save(adapted, path, target)
    same("log-probs of the merged checkpoint", expected(loaded(merged), rows), adapted.forward([batch_of(rows)])[0])


def _check_jax(path, model, rows):
    trainer = JaxTrainer()
    trainer.init_worker(TrainerSpec(model_path=path, device=Device.CPU))
    same("log-probs", trainer.forward([batch_of(rows)])[0], expected(model, rows))
    trainer.close()


def _check_bf16(path, model, device, *, serves):
    """Return the errors of trainer and engine in bf16, as multiples of that of transformers in bf16.

    An error is the mean distance, over tokens, of log-probs from those of transformers in fp32. Experts that change
    make it noisy, so a ratio above the limit is the mean of up to four draws. Return "–" if transformers does not
    compute the model in bf16, or without error.
    """
    half = loaded(path).to(torch.device(device), torch.bfloat16)
    try:
        expected(half, [TEXT])
    except RuntimeError:
        return "–"
    trainer = trainer_of(path, device, precision=BF16)
    runner = runner_of(path, device, slots=12, dtype=WeightDType.BFLOAT16) if serves else None

    def ratio(values, rows):
        wanted, own = (np.concatenate([expected(each, [row])[-40:] for row in rows]) for each in (model, half))
        error = np.abs(np.concatenate(values) - wanted).mean()
        if not np.isfinite(error):
            raise WrongError("log-probs in bf16 are not finite")
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(error / np.abs(own - wanted).mean())

    draws = list[list[float]]()
    while len(draws) < 4 and (not draws or max(np.mean(draws, axis=0)) > MOST_IN_BF16):
        rows = np.random.default_rng(2 + len(draws)).integers(12, zoo.VOCAB - 4, (12, 40)).tolist()
        draws.append([ratio(np.split(trainer.forward([batch_of(rows)])[0], len(rows)), rows)])
        if runner is not None:
            answers = _sampled(runner, [row[:16] for row in rows], count=40)
            draws[-1].append(ratio([each for _, each in answers], [row for row, _ in answers]))
    if np.isnan(draws).any():  # neither has an error
        return "–"
    shown = " / ".join(f"{each:.2f}" for each in np.mean(draws, axis=0))
    if max(np.mean(draws, axis=0)) > MOST_IN_BF16:
        raise WrongError(f"errors in bf16 are {shown} of transformers'")
    return shown


def survey(path, place, device):
    """Return the record of the model in `path`; checkpoints are written below the directory `place`."""
    rows, model = sequences(), loaded(path)
    batch, record, trainers = batch_of(rows), dict[str, str](), list[TorchTrainer]()

    def train():
        trainer = trainer_of(path, device)
        trainers.append(trainer)
        record["rows"] = "packed" if trainer._worker.loaded.model.packs else "padded"
        same("log-probs", trainer.forward([batch])[0], expected(model, rows))
        _check_gradient(model, rows, batch, step(trainer, batch))

    def attempt(use, check):
        try:
            check()
        except (PipelineError, TrainerError) as error:
            record[use] = f"refused: {error}".replace(f"{path}", "the model")
        except WrongError as error:
            record[use] = f"wrong: {error}"
        except Exception as error:  # a traceback for the user, whatever its class
            record[use] = f"fails: {type(error).__name__}: {error}".splitlines()[0][:160]
        else:
            record.setdefault(use, "yes")

    attempt("trains", train)
    trainer = trainers[0] if record["trains"] == "yes" else None
    if trainer is not None:
        attempt("checkpoint", lambda: _check_checkpoint(trainer, path, rows, place / "checkpoint", device))
        attempt("lora", lambda: _check_lora(path, rows, place / "merged", device))
    attempt("serves", lambda: _check_engine(path, model, trainer, rows, device))
    if trainer is not None:
        serves = record["serves"] == "yes"
        attempt("bf16", lambda: record.__setitem__("bf16", _check_bf16(path, model, device, serves=serves)))
    if device is Device.CPU:
        attempt("jax", lambda: _check_jax(path, model, rows))
    return record


@contextmanager
def quiet():
    """Hide transformers' warnings, such as those about kernels that are not installed."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    yield
    logging.set_verbosity(level)


def measured(name, device=Device.CPU):
    """Return the record of one family."""
    with TemporaryDirectory() as folder, quiet():
        return survey(zoo.save(Path(folder) / "model", name), Path(folder), device)


def verdicts(record):
    """Return what a record says of each use, without figures."""
    return {use: "yes" if verdict[0].isdigit() else cell(verdict) for use, verdict in record.items()}


def record_all(names):
    """Measure families, and write records, page and README."""
    families = dict(Records.read().families) if names else {}
    for name in names or zoo.FAMILIES:
        families[name] = measured(name)
        print(name, json.dumps(families[name]), flush=True)
    ordered = {name: families[name] for name in zoo.FAMILIES if name in families}
    Records({name: version(name).partition("+")[0] for name in ("transformers", "torch")}, ordered).write()


def compare(names, device):
    """Measure families in several processes, print each record and what differs, and return how many families differ.

    Families that this transformers does not know are named and left out.
    """
    names, recorded, differ, unknown = names or list(zoo.FAMILIES), Records.read().families, 0, []
    with ProcessPoolExecutor(min(8, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as processes:
        for name, each in zip(names, processes.map(partial(_attempted, device=device), names), strict=True):
            if each is None:
                unknown.append(name)
                continue
            wanted = verdicts(recorded[name])
            if device is Device.CUDA:
                del wanted["jax"]
            changed = {use: each.get(use) for use in wanted if verdicts(each).get(use) != wanted[use]}
            differ += bool(changed)
            print(name, json.dumps(each), f"DIFFERS: {json.dumps(changed)}" * bool(changed), flush=True)
    lacking = ", ".join(unknown) or "none"
    print(f"{len(names) - len(unknown)} families measured, {differ} differ; this transformers lacks {lacking}")
    return differ


def _attempted(name, device):
    """Return the record of one family, or None if this transformers does not know it."""
    torch.set_num_threads(1)
    try:
        return measured(name, device)
    except Exception as error:  # the others must still run
        unknown = isinstance(error, KeyError) and error.args == (zoo.FAMILIES[name].model_type,)
        return None if unknown else {"survey": f"fails: {type(error).__name__}: {error}".splitlines()[0][:300]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    options, chosen = ([each for each in sys.argv[1:] if each.startswith("--") is is_one] for is_one in (True, False))
    if options:
        sys.exit(bool(compare(chosen, Device(options[0].removeprefix("--")))))
    record_all(chosen)
