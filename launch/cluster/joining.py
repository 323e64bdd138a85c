"""`run_node`: is this machine the head of the run, or another of its hosts? The head's node is the launcher."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from launch import run_directory
from launch.cluster.membership import Members, read_members, write_members
from launch.cluster.node import serve_share
from launch.run import Connect, prepare, resume
from pipelinerl.config.recipe import RunConfig, load


def run_node(
    run_dir: Path,
    name: str,
    members_of: Callable[[RunConfig], Members | None],
    *,
    recipe: Path | None,
    claim: Callable[[RunConfig], bool],
    connect: Connect,
) -> int:
    """Run the share of the host `name`; returns the exit status.

    `members_of` gives the hosts of the command line, if it names any: then they take the place of those that the run
    was begun with, for schedulers that choose other hosts each time. Where there is no run in `run_dir` yet, the head
    begins it there, by `recipe`.

    Raises:
        UserError: this host has no part in the run, or its share cannot be run.
    """
    if recipe is not None and not (run_dir / "recipe.toml").is_file():
        config = _in(run_dir, load(recipe))
        given = members_of(config)
        if given is not None and given.hosts[0].name == name:
            run_directory.refuse_taken(run_dir)
            prepare(config, claim=claim, members=given)
    members = read_members(run_dir)
    if (run_dir / "recipe.toml").is_file():
        given = members_of(run_directory.open_run(run_dir).config)
        if given is not None and given.hosts[0].name == name:
            write_members(run_dir, given)
        members = given or members
    if members is not None and members.hosts[0].name == name:
        return resume(run_dir, connect=connect)
    return serve_share(run_dir, name)


def _in(run_dir: Path, config: RunConfig) -> RunConfig:
    """The same run in that directory."""
    section = config.run.model_copy(update={"directory": run_dir.parent, "name": run_dir.name})
    return config.model_copy(update={"run": section})
