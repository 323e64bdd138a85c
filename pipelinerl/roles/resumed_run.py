"""The run to resume: its local directory, rebuilt from copies if need be, and the claim of a run's name."""

from __future__ import annotations

import logging
import shutil
import tomllib
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import tomli_w
from pydantic import SecretStr

from pipelinerl.config.recipe import RunConfig, check_layout, load, parse, save, to_table, write_layout
from pipelinerl.errors import CheckpointError, RecipeError, UserError
from pipelinerl.models.checkpoint import weight_files
from pipelinerl.models.directory_copy import copy_model_files
from pipelinerl.roles.wiring import checkpoints_of, copies_of, objective_of
from pipelinerl.system.storage import Storage
from pipelinerl.training.checkpoints.copies import RUN, CheckpointCopies
from pipelinerl.training.checkpoints.manifest import Retention

log = logging.getLogger("pipelinerl")

#: Text by which URLs are recognised; a path does not contain it.
_SCHEME: Final = "://"
_RECIPE: Final = "recipe.toml"
#: Hosts in a stream server's URL that mean this machine; None stands for a Unix socket.
_LOCAL_HOSTS: Final = (None, "127.0.0.1", "::1", "localhost")


def directory_of(where: str) -> Path:
    """Return the local directory of the run at `where`, ready to resume; a run at a URL is downloaded first.

    Raises:
        UserError: there is no run, its checkpoint location has a newer checkpoint, or its directory has another layout
            or, if the run is to be downloaded, exists already.
    """
    if _SCHEME in where:
        return _restored(where.rstrip("/"))
    run_dir = Path(where)
    check_layout(run_dir)
    if (run_dir / _RECIPE).is_file():
        # If the run continued on another machine, its newer checkpoints at the location must not be lost.
        config = load(run_dir / _RECIPE)
        copies = copies_of(config, run_dir)
        newest = next(copies.newest(), None) if copies is not None else None
        here = newest_step(config, run_dir)
        if copies is not None and newest is not None and here < _step(newest.name):
            raise UserError(
                f"this run continued elsewhere: its newest checkpoint in {run_dir} is of step {here}, in {copies.url} "
                f"of step {_step(newest.name)}; move {run_dir} away and use --resume {copies.url}"
            )
    return run_dir


def newest_step(config: RunConfig, run_dir: Path) -> int:
    """Return the step of the newest checkpoint in the directory; 0 if there is no checkpoint."""
    return max((_step(path.name) for path in checkpoints_of(config, run_dir).all()), default=0)


def claim(config: RunConfig) -> bool:
    """Claim the run's name at the recipe's `checkpoint.location`, if any; return False if another run has the name."""
    url = config.checkpoint.url_of(config.run.name)
    if url is None:
        return True
    place = Storage(url)
    if place.names():
        return False
    place.write(_RECIPE, tomli_w.dumps(to_table(config)).encode())
    return True


def write_recipe(config: RunConfig, run_dir: Path, redis_url: str, *, begins: bool) -> None:
    """Write the resolved recipe to the run's directory, unless the launcher has written it already.

    If the run `begins` now and its checkpoint location holds another run of this name, `UserError` is raised instead.
    The recipe includes the address of the stream server, so that the run can be resumed. An address on this machine is
    left out, because a run that is resumed on another machine has its stream server on that machine.
    """
    path = run_dir / _RECIPE
    if path.exists():
        return
    if urlsplit(redis_url).hostname not in _LOCAL_HOSTS:
        config = config.changed("streams", redis_url=SecretStr(redis_url))
    url, taken = config.checkpoint.url_of(config.run.name), False
    try:
        taken = not claim(config)
    except (OSError, UserError) as error:
        # Do not fail: the trainer's process may be the only one that can write to the location.
        log.warning("%s cannot be resumed from yet, because the recipe cannot be written there: %s", url, error)
    if taken and begins:
        raise UserError(
            f"{url} holds the copies of a run, and {run_dir} is not its directory; choose another "
            f"run.name, or resume that run: pipelinerl run --resume {url}"
        )
    write_layout(run_dir)
    save(config, path)


def _restored(url: str) -> Path:
    """Rebuild a run's directory from the copies at `url`, completely or not at all; return its path on this machine."""
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
    # The copies contain no recipe if the trainer ran in another directory.
    if not (draft / _RECIPE).is_file():
        (draft / _RECIPE).write_bytes(recipe)
    if checkpoint is not None:
        _bring_model(checkpoint, draft, run_dir)
    (draft / _RECIPE).chmod(0o600)  # only for the owner: the recipe may contain the password of a stream server
    write_layout(draft)  # the current layout is right, because streams and journal are not copied
    draft.rename(run_dir)
    return run_dir


def _fetch_newest(copies: CheckpointCopies, draft: Path) -> Path | None:
    """Download the newest complete checkpoint and its run files to `draft`; return its path, None if there is none."""
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
    """Use the model in the checkpoint as the run's model if the recipe's model is missing on this machine.

    Both models have the same configuration and tokenizer, and the trainer reads its weights from the checkpoint anyway.
    Only a reference model and LoRA need the weights that the run began with; then a missing model is a `UserError`.
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
    copy_model_files(checkpoint, draft / "model")
    for file in weight_files(checkpoint):
        shutil.copyfile(file, draft / "model" / file.name)
    save(config.changed("model", path=str(run_dir / "model")), draft / _RECIPE)


def _step(name: str) -> int:
    return int(name.removeprefix("step-"))
