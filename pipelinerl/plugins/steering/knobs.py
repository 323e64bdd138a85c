"""The commands `pipelinerl knobs …`: show and change the settings of a live run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from pipelinerl.errors import RecipeError
from pipelinerl.observability.events import changes_words
from pipelinerl.roles.role import Run

knobs_app = typer.Typer(help="Show or change the knobs of a live run.", no_args_is_help=True)


@knobs_app.command("show")
def knobs_show(run: Run) -> None:
    """Show the knobs of a live run (settings that may change while it runs) and the log of their changes."""
    from pipelinerl.commands.remote import controller_of

    with controller_of(run) as controller:
        answer = controller.knobs()
    for line in _knob_lines(answer.knobs):
        typer.echo(line)
    for change in answer.log:
        typer.echo(f"step {change.step}: {changes_words(change.changes)} by {change.who}")


@knobs_app.command("set")
def knobs_set(run: Run, changes: Annotated[list[str], typer.Argument(help="knob=value …, e.g. k=4 j=2")]) -> None:
    """Change knobs of a live run; changes take effect at the next step boundary."""
    from pipelinerl.commands.remote import controller_of

    made: dict[str, str] = {}
    for change in changes:
        name, separator, value = (part.strip() for part in change.partition("="))
        if not (separator and name):
            raise RecipeError(f"expected knob=value, got {change!r}")
        if name in made:
            raise RecipeError(f"{name} is given twice, as {made[name]} and as {value}; give it once")
        made[name] = value
    with controller_of(run) as controller:
        answer = controller.change_knobs(made)
    for line in _knob_lines(answer.knobs):
        typer.echo(line)
    typer.echo(f"effective {answer.effective}")


def _knob_lines(knobs: Mapping[str, Any], within: str = "") -> Iterator[str]:
    """Yield each knob in the form that `knobs set` accepts: domain_weights.math = 1.0."""
    for name, value in knobs.items():
        if isinstance(value, Mapping):
            yield from _knob_lines(value, f"{within}{name}.")
        else:
            yield f"{within}{name} = {value}"
