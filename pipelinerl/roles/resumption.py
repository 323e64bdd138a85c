"""`pipelinerl run --resume`: find the directory of a run, or restore it from the location of its copies.

A path resumes from the newest complete checkpoint in it. A URL, `s3://bucket/runs/tiny`, is first downloaded to the
directory that its recipe names: the newest complete checkpoint, the recipe and the events. Streams are not copied;
prompt orders in flight are issued again.

Each run that copies its checkpoints to a location writes its recipe there before it begins. This claims the name, and
lets a run without any checkpoint begin again.
"""

from __future__ import annotations

import logging
import shutil
import tomllib
from pathlib import Path
from typing import Final

import tomli_w

from pipelinerl.config.recipe import RunConfig, check_layout, load, parse, save, to_table, write_layout
from pipelinerl.errors import CheckpointError, RecipeError, UserError
from pipelinerl.roles.wiring import checkpoints_of, copies_of, objective_of
from pipelinerl.system.storage import Storage
from pipelinerl.training.checkpoints.copies import RUN, CheckpointCopies
from pipelinerl.training.checkpoints.manifest import MANIFEST
from pipelinerl.training.checkpoints.retention import Retention

log = logging.getLogger("pipelinerl")

#: Distinguishes a URL from a path.
_SCHEME: Final = "://"
_RECIPE: Final = "recipe.toml"


def directory_of(where: str) -> Path:
    """Return the directory of the run at `where`, a path or a URL, ready to resume.

    Raises:
        UserError: there is no run, there are two places to resume from, or the run has another layout.
    """
    if _SCHEME in where:
        return _restored(where.rstrip("/"))
    run_dir = Path(where)
    check_layout(run_dir)
    if (run_dir / _RECIPE).is_file():
        _refuse_older(load(run_dir / _RECIPE), run_dir)
    return run_dir


def newest_step(config: RunConfig, run_dir: Path) -> int:
    """Return the step of the newest checkpoint in the directory; 0 if there is no checkpoint."""
    return max((_step(path.name) for path in checkpoints_of(config, run_dir).all()), default=0)


def claim(config: RunConfig) -> bool:
    """Claim the run's name at the recipe's location; return False if another run has it. Without a location, return
    True.
    """
    url = config.checkpoint.url_of(config.run.name)
    if url is None:
        return True
    place = Storage(url)
    if place.names():
        return False
    place.write(_RECIPE, tomli_w.dumps(to_table(config)).encode())
    return True


def _restored(url: str) -> Path:
    """Download the run's directory from its location, completely or not at all; return its path."""
    try:
        recipe = Storage(url).read(_RECIPE)
    except FileNotFoundError:
        raise UserError(f"{url} holds no run; expected <checkpoint.location>/<run.name> of its recipe") from None
    try:
        run_dir = parse(tomllib.loads(recipe.decode())).run_directory.resolve()
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{url}/{_RECIPE}: not valid TOML: {error}") from None
    if run_dir.exists():
        raise UserError(
            f"{run_dir} exists, and {url} would be restored there; resume what is there with --resume {run_dir}, or "
            "move it away"
        )
    draft = run_dir.with_name(f".{run_dir.name}-arriving")
    checkpoint = _fetch_newest(CheckpointCopies(url, retention=Retention(1)), draft)
    if checkpoint is None:
        log.warning("%s holds no complete checkpoint; the run begins again", url)
    if not (draft / _RECIPE).is_file():  # a trainer that ran in another directory copied no recipe
        (draft / _RECIPE).write_bytes(recipe)
    if checkpoint is not None:
        _bring_model(checkpoint, draft, run_dir)
    (draft / _RECIPE).chmod(0o600)  # private, because users may write the password of their stream server into it
    write_layout(draft)  # the current layout is right, because streams and journal are not copied
    draft.rename(run_dir)
    return run_dir


def _fetch_newest(copies: CheckpointCopies, draft: Path) -> Path | None:
    """Download the newest complete checkpoint into `draft`, and the files copied with it; None if there is no such
    checkpoint.
    """
    for copy in copies.newest():
        shutil.rmtree(draft, ignore_errors=True)
        checkpoint = draft / "checkpoints" / copy.name
        try:
            copies.fetch(copy, checkpoint)
        except CheckpointError as error:
            log.error("skipping a damaged checkpoint: %s", error)
            continue
        for file in (checkpoint / RUN).glob("*"):
            shutil.copyfile(file, draft / file.name)
        return checkpoint
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    return None


def _bring_model(checkpoint: Path, draft: Path, run_dir: Path) -> None:
    """Make the checkpoint's model the run's model if the recipe's model is missing on this machine.

    Configuration and tokenizer are the same, and the trainer takes its weights from the checkpoint anyway. Only a
    reference and LoRA adapters need the weights that the run began with.

    Raises:
        UserError: the run has such a reference, or adapters.
    """
    config = load(draft / _RECIPE)
    if config.model.resolved.is_dir():
        return
    if "ref_logprobs" in objective_of(config).passes and (config.reference is None or config.reference.path is None):
        raise UserError(
            f"{config.model.resolved} is not on this machine, and is the reference of this run; copy it here"
        )
    if config.trainer.options.get("lora") is not None:
        raise UserError(
            f"{config.model.resolved} is not on this machine, and is the base of this run's LoRA; copy it here"
        )
    (draft / "model").mkdir()
    for file in checkpoint.iterdir():
        if file.is_file() and file.name != MANIFEST:
            shutil.copyfile(file, draft / "model" / file.name)
    moved = config.model_copy(update={"model": config.model.model_copy(update={"path": str(run_dir / "model")})})
    save(moved, draft / _RECIPE)


def _refuse_older(config: RunConfig, run_dir: Path) -> None:
    """Refuse to resume if the run's location has a newer checkpoint: the run may have continued on another machine."""
    copies = copies_of(config, run_dir)
    there = next(copies.newest(), None) if copies is not None else None
    if copies is None or there is None:
        return
    here = newest_step(config, run_dir)
    if here < _step(there.name):
        raise UserError(
            f"this run continued elsewhere: its newest checkpoint in {run_dir} is of step {here}, in {copies.url} of "
            f"step {_step(there.name)}; move {run_dir} away and use --resume {copies.url}"
        )


def _step(name: str) -> int:
    return int(name.removeprefix("step-"))
