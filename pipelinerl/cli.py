"""The `pipelinerl` command line. Each command parses its arguments and calls the module that does the work.

User errors are printed as one sentence on stderr with exit status 2. Commands import heavy libraries lazily.
"""

from __future__ import annotations

import io
import json as json_text
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.cluster.command_line import (
    FirstPort,
    Gpus,
    HostCount,
    HostWords,
    Image,
    On,
    SlurmOptions,
    add_cluster_commands,
    elsewhere_of,
    members_of,
    refuse_hosts,
)
from pipelinerl.commands.compare import compare
from pipelinerl.commands.conformance import bench, chaos, conformance_app, in_checkout
from pipelinerl.commands.engines import Overrides, Run, engines_app
from pipelinerl.commands.knobs import knobs_app
from pipelinerl.commands.live_views import top, watch
from pipelinerl.config import recipe as recipes
from pipelinerl.enums import Skill
from pipelinerl.errors import PipelineError, UserError
from pipelinerl.observability.logs import without_secrets
from pipelinerl.observability.samples.record import visible
from pipelinerl.plugins.evaluation.command_line import evaluate, prefilter
from pipelinerl.plugins.oubliette.command_line import oubliette_app
from pipelinerl.roles.catalogue import ROLES
from pipelinerl.roles.role import Changes, hide_password, joined
from pipelinerl.system.files import system_words, working_directory
from pipelinerl.system.process import collect_rarely, run_process

if TYPE_CHECKING:
    from pipelinerl.plugins.memory.prediction import MemoryPrediction

app = typer.Typer(
    name="pipelinerl",
    help="Asynchronous streaming RL post-training with in-flight weight updates.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(knobs_app, name="knobs")
app.add_typer(engines_app, name="engines")
app.add_typer(oubliette_app, name="sandbox")
app.add_typer(oubliette_app, name="oubliette", hidden=True)  # the earlier name
app.add_typer(conformance_app, name="conformance")
app.command("eval")(evaluate)
app.command()(prefilter)
app.command()(watch)
app.command()(top)
app.command()(compare)


Recipe = Annotated[str, typer.Argument(help="A recipe file, or the name of a shipped recipe.")]
RunPath = Annotated[Path, typer.Argument(help="Directory of the run, such as runs/tiny.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pipelinerl {version('pipelinerl')}")
        raise typer.Exit


@app.callback(context_settings={"help_option_names": ["-h", "--help"]})
def _common(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
@app.command("train", hidden=True)
def run(
    recipe: Annotated[str | None, typer.Argument(help="Recipe file, or name of a shipped one (default: tiny).")] = None,
    overrides: Overrides = None,
    changes: Changes = None,
    resume: Annotated[
        str | None,
        typer.Option(help="Resume the run in this directory or at this URL; changes may follow: run.steps=200."),
    ] = None,
    new: Annotated[
        bool, typer.Option("--new", help="Start another run although one of this name is live; adds a number.")
    ] = False,
    host: HostWords = None,
    hosts: HostCount = None,
    gpus: Gpus = None,
    first_port: FirstPort = None,
    on: On = None,
    slurm: SlurmOptions = None,
    image: Image = None,
) -> None:
    """Train: start every role on this machine, show progress, write the report. Ctrl-C saves and stops the run.

    `pipelinerl train` is the same.

    With --host, this machine is the first of several that each run `pipelinerl node`. With --on, a cluster launcher
    starts them (docs/use/clusters.md).
    """
    from launch import run as launching
    from launch.run_directory import change_recipe, open_run, record_change, refuse_namesake
    from pipelinerl.commands.remote import started_by_hand
    from pipelinerl.plugins.memory.disk import refuse_full_disk, settled
    from pipelinerl.roles import controller_role

    made = joined(overrides, changes)
    if recipe is not None and "=" in recipe and not Path(recipe).is_file():  # a change of the default recipe
        made = [recipe, *made]
        recipe = None
    if resume is not None:
        if recipe is not None:
            raise UserError(f"--resume uses the recipe in {resume}; give only changes, such as run.steps=200")
        refuse_hosts(resume, on, host, hosts)
        path = controller_role.directory_of(resume)
        open_run(path)
        config = change_recipe(path, made)
        _refuse_here(config)
        refuse_full_disk(config, _predicted(config), path)
        for change in record_change(path, config, step=controller_role.newest_step(config, path)):
            typer.echo(change)
        raise typer.Exit(launching.resume(path, connect=_connect))
    config = recipes.load(recipe or "tiny", made)
    if not new and on is None:
        refuse_namesake(config, by_hand=started_by_hand)
    members = members_of(config, host, hosts, gpus, first_port)
    (_refuse_here if on is None else _refuse)(config)
    if on is not None:
        from launch.cluster.launchers import start_on

        raise typer.Exit(start_on(config, elsewhere_of(on, members, slurm, image), claim=controller_role.claim))
    limits = launching.memory_limits(config) if members is None else {}
    if members is None:
        config = settled(config, limits)
    predicted = _predicted(config)
    refuse_full_disk(config, predicted)
    directory = launching.prepare(config, claim=controller_role.claim, members=members)
    for line in _memory_lines(predicted, limits):
        typer.echo(line)
    raise typer.Exit(launching.resume(directory, connect=_connect))


@app.command()
def new(
    directory: Annotated[Path, typer.Argument(help="Directory to create for the recipe and its rewards.")],
    model: Annotated[Path, typer.Option(help="A local Hugging Face model directory.")],
    data: Annotated[
        Path, typer.Option(help="Rows with a prompt and an answer: JSON lines, JSON, CSV, Parquet, Arrow.")
    ],
    prompt_field: Annotated[str | None, typer.Option(help="Field with the prompt (default: detected by name).")] = None,
    answer_field: Annotated[str | None, typer.Option(help="Field with the answer (default: by name).")] = None,
) -> None:
    """Write a recipe and a reward function for your model and data file, ready to check and run."""
    from pipelinerl.commands.new_recipe import write_new

    path = write_new(directory, model=model, data=data, prompt_field=prompt_field, answer_field=answer_field)
    typer.echo(f"{path} and {path.with_name('rewards.py').name} are written; next: pipelinerl check {path}")


@app.command()
def check(
    recipe: Recipe,
    overrides: Overrides = None,
    changes: Changes = None,
    device_gib: Annotated[
        float | None, typer.Option(min=0, max=2**20, help="Device memory in GiB (default: this machine's).")
    ] = None,
) -> None:
    """Check a recipe without training: reject every mistake that would stop the run.

    Exit status 1: the recipe is valid, but needs more memory or disk than this machine has, or a GPU that it lacks.
    With --device-gib, the recipe is for another machine, and a missing GPU is only a warning.
    """
    from launch.run import describe_placement, memory_limits
    from pipelinerl.commands.check import findings, keys_without_gpu
    from pipelinerl.plugins.memory import disk, prediction as memory
    from pipelinerl.plugins.memory.disk import settled

    config = recipes.load(recipe, joined(overrides, changes))
    limit = None if device_gib is None else int(device_gib * 2**30)
    limits = memory_limits(config) if limit is None else {"trainer": limit, "engine": limit}
    config = settled(config, limits)
    for name, finding in findings(config):
        typer.echo(f"{name:<12} {finding}")
    typer.echo(f"{'placement':<12} {describe_placement(config)}")
    predicted = _predicted(config)
    for line in _memory_lines(predicted, limits):
        typer.echo(f"{'memory':<12} {line}")
    typer.echo(f"{'disk':<12} {disk.disk_line(config, predicted)}")
    lacking = [] if memory.fits(predicted, limits=limits) else ["memory"]
    if limit is None and keys_without_gpu(config):
        lacking.append("GPUs")
    for sentence in disk.disk_faults(config, predicted):
        typer.echo(f"{'disk':<12} {sentence}")
        lacking.append("disk")
    if lacking:
        typer.echo(f"the recipe needs more {' and '.join(lacking)} than this machine has")
        raise typer.Exit(1)
    typer.echo("the recipe can run")


def _predicted(config: recipes.RunConfig) -> MemoryPrediction:
    from pipelinerl.plugins.memory import prediction as memory
    from pipelinerl.roles.wiring import objective_of

    return memory.predict(config, objective_of(config))


def _memory_lines(predicted: MemoryPrediction, limits: Mapping[str, int]) -> Iterator[str]:
    from pipelinerl.plugins.memory import prediction as memory

    if (line := memory.trainable(predicted)) is not None:
        yield line
    yield from memory.lines(predicted, limits=limits)


@app.command()
def status(
    run: Run,
    json: Annotated[bool, typer.Option("--json", help="Print the whole state as JSON.")] = False,
) -> None:
    """Show what a live run is doing and what it waits for."""
    from pipelinerl.commands.remote import access_line, controller_of
    from pipelinerl.observability import progress

    with controller_of(run) as controller:
        state = controller.status()
    if json:
        typer.echo(state.to_json())
        return
    for line in (
        progress.line(state),
        *progress.server_lines(state),
        *progress.domain_lines(state),
        access_line(run, state.fleet.engines),
    ):
        typer.echo(visible(line))


@app.command()
def stop(
    run: Run,
    suspend: Annotated[
        bool, typer.Option("--suspend", help="Save and stop now, without a final evaluation; continue with --resume.")
    ] = False,
) -> None:
    """Stop a live run at its next step boundary, after a final checkpoint and evaluation."""
    from pipelinerl.commands.remote import controller_of

    with controller_of(run) as controller:
        if suspend:
            controller.suspend()
        else:
            controller.stop()
    typer.echo("the run will stop at its next step boundary")


@app.command()
def report(run_dir: RunPath) -> None:
    """Write learning_curve.png and report.html of a run, live or finished."""
    from launch import run as launching

    for path in launching.report(run_dir):
        typer.echo(str(path))


@app.command()
def warmstart(
    output: Annotated[Path, typer.Argument(help="Directory to create for the model.")],
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and demonstrations.")] = 0,
    recipe: Annotated[str, typer.Option(help="Recipe whose domains provide the demonstrations.")] = "tiny",
    hidden: Annotated[int, typer.Option(min=1, help="Width of the decoder.")] = 96,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the decoder.")] = 2,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 4,
    vocab: Annotated[int, typer.Option(min=0, help="Tokens to learn from the problems (0: characters).")] = 0,
    skill: Annotated[Skill, typer.Option(help="Measure greedy answers, or rewards by domain.")] = Skill.EXACT,
    at_least: Annotated[float, typer.Option(min=0, max=1, help="Stop at this skill on the validation split.")] = 0.38,
    at_most: Annotated[float, typer.Option(min=0, max=1, help="Fail above it: RL would have too little to do.")] = 0.44,
) -> None:
    """Create a small model and fit it to demonstrations until it has partial skill, as a starting point for RL."""
    from pipelinerl.plugins.warmstart.command_line import WarmStartOptions, make

    options = WarmStartOptions(
        hidden=hidden, layers=layers, heads=heads, band=(at_least, at_most), seed=seed, skill=skill, vocab=vocab
    )
    make(recipes.load(recipe), options, output=output, say=typer.echo)


@app.command()
def sft(
    recipe: Annotated[str, typer.Argument(help="Recipe whose model is trained, on the right answers of its domains.")],
    output: Annotated[Path, typer.Argument(help="Directory to create for the trained model.")],
    overrides: Overrides = None,
    changes: Changes = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 100,
    demonstrations: Annotated[int, typer.Option(min=1, help="Demonstrations of each step.")] = 64,
) -> None:
    """Fine-tune a recipe's model on right answers, with the recipe's trainer, as a starting point for RL."""
    from pipelinerl.plugins.warmstart.command_line import FineTuneOptions, fine_tune

    options = FineTuneOptions(steps=steps, demonstrations=demonstrations)
    fine_tune(recipes.load(recipe, joined(overrides, changes)), options, output=output, say=typer.echo)


@app.command()
def mismatch(
    run_dir: RunPath,
    json: Annotated[bool, typer.Option("--json", help="Print every figure and the advice as JSON.")] = False,
) -> None:
    """Show how far trainer and sampler log-probs differ, by cause, and what to do about it; draws mismatch.png."""
    from rich.console import Console

    from pipelinerl.plugins.watch.timeline.command_line import show_mismatch

    show_mismatch(run_dir, Console(soft_wrap=json), as_json=json)


@app.command()
def samples(
    run_dir: RunPath,
    step: Annotated[int | None, typer.Option(help="Only samples of this step.")] = None,
    domain: Annotated[str | None, typer.Option(help="Only samples of this domain.")] = None,
    tag: Annotated[str | None, typer.Option(help="Only problems with this tag.")] = None,
    worst: Annotated[bool, typer.Option("--worst", help="Lowest rewards first.")] = False,
    best: Annotated[bool, typer.Option("--best", help="Highest rewards first.")] = False,
    truncated: Annotated[bool, typer.Option("--truncated", help="Only truncated answers.")] = False,
    filtered: Annotated[bool, typer.Option("--filtered", help="Filtered groups, one for each step.")] = False,
    evaluation: Annotated[bool, typer.Option("--evaluation", help="Answers to held-out problems.")] = False,
    evaluation_set: Annotated[str | None, typer.Option(help="Only answers to this evaluation set.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of answers.")] = 16,
    follow: Annotated[bool, typer.Option("--follow", help="Keep showing new samples until the run is over.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each answer.")] = False,
) -> None:
    """Show sampled answers: problem, answer, verdict, reward, advantage and versions, of a live or finished run."""
    from rich.console import Console

    from pipelinerl.commands import samples as shown
    from pipelinerl.observability.samples.reading import LENGTH, Ranking, SampleQuery
    from pipelinerl.observability.samples.record import SampleKind

    if worst and best:
        raise typer.BadParameter("--worst and --best exclude each other")
    if follow and (worst or best):
        raise typer.BadParameter("--follow shows samples as they come: leave out --worst and --best")
    kinds = {SampleKind.FILTERED} if filtered else set()
    kinds |= {SampleKind.EVALUATION} if evaluation or evaluation_set is not None else set()
    query = SampleQuery(
        kinds=frozenset(kinds or {SampleKind.TRAINED}),
        step=step,
        domain=domain,
        tag=tag,
        evaluation=evaluation_set,
        finish_reason=LENGTH if truncated else None,
        ranking=Ranking.WORST if worst else Ranking.BEST if best else Ranking.NEWEST,
        limit=limit,
    )
    (shown.follow if follow else shown.show)(run_dir, query, Console(soft_wrap=True), as_json=json)


@app.command()
def trace(
    run_dir: RunPath,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write (default: the run's trace.json.gz).")
    ] = None,
) -> None:
    """Export a run's timeline for Perfetto: what each role and engine did when, and the origin of each version."""
    from pipelinerl.plugins.watch.timeline.command_line import trace_run

    typer.echo(trace_run(run_dir, output))


@app.command()
def track(
    run_dir: RunPath,
    tensorboard: Annotated[Path, typer.Option(help="Directory for event files that TensorBoard reads.")],
) -> None:
    """Export a run's metrics to TensorBoard, live or finished; a repeated call adds only the latest events."""
    from pipelinerl.plugins.watch.timeline.command_line import track_run

    typer.echo(track_run(run_dir, tensorboard))


@app.command()
def explain(
    choice: Annotated[
        str | None,
        typer.Argument(metavar="PRESET|RECIPE", help="An algorithm or a recipe (default: list the algorithms)."),
    ] = None,
    overrides: Overrides = None,
    changes: Changes = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="A B", help="Two algorithms or recipes; shows what each makes of the same rollouts."),
    ] = None,
    rollout: Annotated[
        list[Path] | None, typer.Option(help="Rollouts (JSON, or a group's record); shows each token's factors.")
    ] = None,
    run: Annotated[Path | None, typer.Option(help="A finished run; explains rollouts of one of its steps.")] = None,
    step: Annotated[int | None, typer.Option(help="The step of that run.")] = None,
    group: Annotated[int | None, typer.Option(help="Show only the group of this order.")] = None,
) -> None:
    """Explain an objective: its five terms (slots), formula, cost and source, and its effect on given rollouts."""
    from rich.console import Console

    from pipelinerl.plugins.explain import command_line as command

    if compare is not None and choice is not None:
        raise typer.BadParameter("--compare names both algorithms; leave out the argument")
    if (run is None) != (step is None) or (group is not None and run is None):
        raise typer.BadParameter("--run and --step belong together, and --group to both")
    if rollout and choice is None and compare is None:
        raise typer.BadParameter("name an algorithm or a recipe to explain the rollouts with")
    if choice is None and run is None and compare is None:
        command.catalogue(Console())
        return
    of_run = None if run is None or step is None else command.OfRun(run, step, group)
    if of_run is not None:
        recipes.load_run(of_run.run_dir)  # fail early if the run does not exist
    if compare is not None:
        command.compare(*compare, rollout or [], Console(), of_run=of_run)
        return
    command.show(choice or f"{run}/recipe.toml", joined(overrides, changes), rollout or [], Console(), of_run=of_run)


@app.command()
def simulate(
    recipe: Recipe,
    overrides: Overrides = None,
    changes: Changes = None,
    from_runs: Annotated[
        list[Path] | None,
        typer.Option(
            "--from", help="A finished, ideally synchronous run to calibrate from; a second one for contention."
        ),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware",
            help="A hardware table instead of a run: a file, or h100, h200 or v5p with a model size (h100:7b), "
            "computed from published figures. Sizes: 0.5b, 1.5b, 3b, 7b, 14b, 32b, 72b.",
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None, typer.Option("--sweep", help="section.key=value,value,…; several are combined.")
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Distribution of answer lengths: fixed:TOKENS or heavy:MEDIAN,SIGMA.")
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Steps of each simulated run.")] = 100,
    engine_hour: Annotated[float | None, typer.Option(min=0, help="Price of an engine per hour.")] = None,
    trainer_hour: Annotated[float | None, typer.Option(min=0, help="Price of the trainer per hour.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots to this file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print every figure as JSON.")] = False,
) -> None:
    """Predict throughput, waits, staleness, discards and cost of a recipe on given hardware, and compare knobs."""
    from pipelinerl.plugins.simulation.planning import basis_of_runs, basis_of_table, json_of, lines_of, page_of, tried
    from pipelinerl.plugins.simulation.prediction import grid, recommended

    if bool(from_runs) == (hardware is not None):
        raise UserError(
            "timings are required: give either --from RUN (a finished run) or --hardware (a file, or such as h100:7b)"
        )
    basis = basis_of_runs(from_runs) if from_runs else basis_of_table(hardware or "")
    prices = replace(
        basis.hardware.prices,
        **{k: v for k, v in (("engine_hour", engine_hour), ("trainer_hour", trainer_hour)) if v is not None},
    )
    basis = replace(basis, hardware=replace(basis.hardware, prices=prices), length_words=lengths or basis.length_words)
    made = joined(overrides, changes)
    trials = [tried(recipe, made, swept, basis, steps=steps) for swept in grid(sweep or [])]
    best = recommended(trials) if sweep else None
    notes = [basis.verdict, *([f"recommended: {' '.join(best.changes)}"] if best is not None else [])]
    if html is not None:
        html.write_text(page_of(f"{recipe}, simulated", trials, notes))
    if json:
        typer.echo(json_text.dumps(json_of(trials, best=best, checks=basis.checks) | {"verdict": basis.verdict}))
        return
    for line in lines_of(trials):
        typer.echo(line)
    for run, errors in basis.checks.items():
        listed = ", ".join(f"{name} {error:+.0%}" for name, error in errors.items())
        typer.echo(f"simulated against measured, {run}: {listed}")
    for note in notes:
        typer.echo(note)
    if html is not None:
        typer.echo(str(html))
    if all(trial.refusal for trial in trials):
        raise typer.Exit(2)


@app.command()
def replay(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a finished run, such as runs/tiny.")],
    step: Annotated[int, typer.Option(help="The step to repeat.")],
    objective: Annotated[str | None, typer.Option(help="A preset to use for that step instead.")] = None,
) -> None:
    """Repeat a step from its checkpoint and recorded rollouts, without engines; exit status 1 if it differs."""
    from rich.console import Console

    # Set before torch is imported: sums depend on the number of threads, so use the trainer's number.
    os.environ.setdefault("OMP_NUM_THREADS", str(recipes.load_run(run_dir).launch.threads))
    from pipelinerl.plugins.replay.command_line import show

    if not show(run_dir, step=step, objective=objective, console=Console()):
        raise typer.Exit(1)


def _connect(url: str, token: str) -> Any:
    from pipelinerl.controller.client import ControllerClient
    from pipelinerl.controller.routes import LAUNCHER

    return ControllerClient(url, token, who=LAUNCHER)


def _claim(config: recipes.RunConfig) -> bool:
    from pipelinerl.roles import controller_role

    return controller_role.claim(config)


app.command(hidden=not in_checkout())(bench)
app.command(hidden=not in_checkout())(chaos)


def _refuse(config: recipes.RunConfig) -> None:
    """Reject a recipe with which the run would fail, before anything is created. Fast, and needs little memory."""
    from pipelinerl.commands.check import refuse
    from pipelinerl.commands.findings.problems import FIRST, refuse_problems

    refuse(config)
    refuse_problems(config, FIRST)


def _refuse_here(config: recipes.RunConfig) -> None:
    """Reject a recipe of a run on this machine, after a trial episode of each agent."""
    from pipelinerl.commands.check import refuse_episodes

    _refuse(config)
    refuse_episodes(config)


add_cluster_commands(app, connect=_connect, claim=_claim, refuse=_refuse)
for _role in ROLES:
    app.command(_role.subcommand, rich_help_panel="Roles (each is one process; `run` starts them all)")(_role.command)


def main() -> None:
    """Run the command line; user errors become one sentence and exit status 2."""
    collect_rarely()
    hide_password()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # some terminals cannot encode the Unicode characters in the output
            stream.reconfigure(errors="backslashreplace")
    try:
        working_directory()
        app(prog_name="pipelinerl")
    except UserError as error:
        print(visible(without_secrets(f"pipelinerl: {error}")), file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:  # such as an unreadable file or a full disk; the system's message names the file
        print(visible(without_secrets(f"pipelinerl: {system_words(error)}")), file=sys.stderr)
        raise SystemExit(1) from None
    except PipelineError as error:
        print(visible(without_secrets(f"pipelinerl: {error}")), file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    run_process(main)
