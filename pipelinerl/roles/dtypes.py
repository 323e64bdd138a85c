"""`dtypes_of`: the dtypes of a run's weights in the model directory, on the wire, and in its engines.

    trainer, fp32 ── weights.dtype ──▶ wire, which is hashed ── engine.dtype, engine.weights ──▶ engine

By default, weights are sent and held by engines in the model directory's dtype. If engines hold float32, float32 is
sent, because bfloat16 hides small updates. A weight that began as a bfloat16 value, and is rounded to bfloat16 for
sending, changes only once it has moved by half of its last bit. At a learning rate of 2e-5 this takes most weights five
steps or more, so the engines' weights would be that many steps older than their version says.

Each engine converts the weights that it receives, so float32, bfloat16 and float16 may be combined. `dtypes_of` rejects
combinations that would ruin the run, before the run begins; an engine would reject them, too, at its first update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipelinerl import registry
from pipelinerl.component import Need, imported
from pipelinerl.config.recipe import RunConfig
from pipelinerl.config.sections import ModelSection
from pipelinerl.errors import ModelError, RecipeError
from pipelinerl.models.checkpoint import model_dtype, quantisation
from pipelinerl.system.machine import has_accelerator
from pipelinerl.training.canary_check import TOLERANCES
from trainer_contract.errors import SpecError
from trainer_contract.types import Device, HeadPrecision, Kernels, Precision, WeightDType


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtypes:
    """The dtypes of the weights in the model directory, on the wire, and in an engine."""

    model: WeightDType
    wire: WeightDType
    engine: WeightDType

    def coarsest(self, config: RunConfig) -> str:
        """Return the least precise format that weights have on their way to an engine, as a key of `TOLERANCES`."""
        trainer = "float32" if config.trainer.passes_in is Precision.FP32 else "bfloat16"
        formats = [trainer, self.wire.value, self.engine.value, config.engine.weights.value]
        return max((each for each in formats if each in TOLERANCES), key=list(TOLERANCES).index)


def sent_in(config: RunConfig) -> WeightDType | None:
    """Return the dtype of weights on the wire; None for the dtype of the model directory."""
    return config.weights.dtype or (WeightDType.FLOAT32 if config.engine.dtype is WeightDType.FLOAT32 else None)


def dtypes_of(config: RunConfig) -> Dtypes:
    """Read the dtypes from recipe and model; `ModelError` if none can serve it, `RecipeError` if they contradict."""
    model = model_dtype(config.model.resolved)
    engine = model if config.engine.dtype == "auto" else config.engine.dtype
    wire = sent_in(config) or model
    if wire is WeightDType.FLOAT16 and model is not WeightDType.FLOAT16:
        raise RecipeError(
            f"weights.dtype must not be float16 for the weights of {config.model.resolved}, which are {model} and may "
            "exceed its range; use bfloat16, or remove it"
        )
    is_float32 = wire is model is WeightDType.FLOAT32
    if config.trainer.type in registry.TRAINERS.having("model_type") and not is_float32:
        raise RecipeError(
            f"trainer.type {config.trainer.type!r} gathers float32, got weights.dtype {wire} and a model in {model}; "
            "use float32 for both"
        )
    if config.engine.type in registry.ENGINES.having("model_type") and engine is not WeightDType.FLOAT32:
        raise RecipeError(
            f"engine.type {config.engine.type!r} computes in float32, got engine.dtype {engine}; remove it"
        )
    rounds = wire is WeightDType.FLOAT32 and engine is not wire
    if config.model.head_precision is HeadPrecision.FP32 and rounds:
        raise RecipeError(
            "model.head_precision=fp32 needs the same head in trainer and engine, but it is sent in weights.dtype "
            f"{wire}, and the engine rounds it to engine.dtype {engine}; set"
            f" weights.dtype={engine} or engine.dtype={wire}"
        )
    computes = WeightDType.FLOAT32 if config.trainer.passes_in is Precision.FP32 else WeightDType.BFLOAT16
    if config.model.kernels is Kernels.BATCH_INVARIANT and {wire, engine} != {computes}:
        raise RecipeError(
            f"model.kernels=batch_invariant needs the same dtype in trainer and engine, got trainer.precision "
            f"{config.trainer.passes_in}, weights.dtype {wire} and engine.dtype {engine}; set weights.dtype={computes} "
            f"and engine.dtype={computes}"
        )
    return Dtypes(model=model, wire=wire, engine=engine)


def settled(config: RunConfig, limits: Mapping[str, int] | None = None) -> RunConfig:
    """Replace `auto` values in the recipe by concrete values.

    `limits` are bytes by kind of process, `all` for their sum (default: this machine's memory). A recipe that
    `pipelinerl check` would reject is returned unchanged, because `check` has the better error message.
    """
    try:
        chosen, trainer = with_dtype(config), config.trainer
        if trainer.precision == "auto":
            is_fast = on_accelerator(trainer.device) and trainer.type in registry.TRAINERS.having("casts")
            is_half = is_fast and model_dtype(config.model.resolved) is WeightDType.BFLOAT16
            chosen = chosen.changed("trainer", precision=Precision.BF16 if is_half else Precision.FP32)
        for _, prediction in registry.NEEDS.loadable():
            chosen = imported(prediction.settle)(chosen, limits) if prediction.settle else chosen
        return chosen
    except (ModelError, RecipeError, SpecError):
        return config


def with_dtype(config: RunConfig) -> RunConfig:
    """Replace `engine.dtype = "auto"` by float32 for engines that cast and run on a CPU."""
    section = config.engine
    if section.dtype != "auto" or section.type not in registry.ENGINES.having("casts"):
        return config
    if section.type not in registry.ENGINES.having("on_host") and on_accelerator(section.device):
        return config
    if model_dtype(config.model.resolved) is WeightDType.FLOAT32:
        return config
    return config.changed("engine", dtype=WeightDType.FLOAT32)


def on_accelerator(device: Device) -> bool:
    """Return whether a process with this device setting uses a GPU or TPU; `auto` does if this machine has one."""
    return device is not Device.CPU and (device is not Device.AUTO or has_accelerator())


# --- quantised models -------------------------------------------------------------------------------------------------


def with_plain_models(config: RunConfig) -> RunConfig:
    """Replace directories with quantised weights by this machine's plain copies, which are written if absent."""
    return with_directories(config, {path: plain_model(path) for path in _directories(config)})


def plain_model(path: Path) -> Path:
    """Return `path` itself, or this machine's plain copy of it if its weights are quantised. Raises `ModelError`."""
    if not _is_quantised(path):
        return path
    copy: Path = imported(registry.COPIES["bf16"].build)(path)
    return copy


def _is_quantised(path: Path) -> bool:
    return (path / "config.json").is_file() and quantisation(path) is not None


@contextmanager
def outlined(config: RunConfig) -> Iterator[tuple[RunConfig, list[Need], Mapping[Path, Path]]]:
    """Yield the recipe with a stand-in for each quantised model whose copy is not written yet, for checks only.

    Also yield the disk space that the copies will take, and the recipe's directories by their stand-ins. A stand-in has
    the copy's configuration and shapes, and exists until the block ends.
    """
    quantised = [path for path in _directories(config) if _is_quantised(path)]
    if not quantised:
        yield config, [], {}
        return
    with imported(registry.COPIES["bf16"].outline)(quantised) as (stands, needs):
        yield with_directories(config, stands), needs, {stand: path for path, stand in stands.items()}


def with_directories(config: RunConfig, new: Mapping[Path, Path]) -> RunConfig:
    """Replace the recipe's model directories that are keys of `new`."""

    def changed(path: str | None) -> str | None:
        found = None if path is None else new.get(ModelSection(path=path).resolved)
        return path if found is None else str(found)

    sections = {name: each for name in ("model", "critic", "reference") if (each := getattr(config, name)) is not None}
    update: dict[str, object] = {
        name: each.model_copy(update={"path": changed(each.path)}) for name, each in sections.items()
    }
    domains = (domain.model_copy(update={"teacher": changed(domain.teacher)}) for domain in config.domains)
    return config.model_copy(update=update | {"domains": tuple(domains)}) if new else config


def _directories(config: RunConfig) -> list[Path]:
    sections = [each for each in (config.model, config.critic, config.reference) if each is not None]
    named = [*(each.path for each in sections), *(domain.teacher for domain in config.domains)]
    return list(dict.fromkeys(ModelSection(path=path).resolved for path in named if path and "://" not in path))
