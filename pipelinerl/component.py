"""A component: one value for each part that a recipe can name, with all that others know of the part.

`registry.py` maps names to these values. To add a part, write its code and its component, and name the component in the
registry, or in the entry points `pipelinerl.components` of a package of your own.

A component imports nothing heavy: `build` and the functions beside it are references (`module:attribute`), which are
imported when they are used.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pipelinerl.errors import RecipeError, ReferenceFailed
from pipelinerl.section import Section
from pipelinerl.system.references import load_reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """A part that a recipe can name: the reference of what builds it, and the packages that it needs.

    Attributes:
        build: reference of the function or class that makes it; the kind says with which arguments.
        section: its options, as a table of the recipe; None if it has none.
        key: key of that table, by default the component's name.
        needs: packages that must be installed. `remedy` says how to install them.
    """

    build: str
    section: type[Section] | None = None
    key: str = ""
    needs: tuple[str, ...] = ()
    remedy: str = "pip install it"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineComponent(Component):
    """An engine; `build` is a function `(EngineOptions) -> Engine`.

    Attributes:
        on_host: it computes on the CPU even if the machine has GPUs, or computes nothing itself.
        drives_server: it forwards requests to an inference server that the user runs (`engine.servers`).
        check_options: reference of a function that raises `RecipeError` for entries of `engine.options` that other keys
            of the recipe set; an engine without it takes no options.
        slow_here: reference of a function `(dtype) -> str | None` that says why the engine is slow on this machine.
        check: reference of a function `(section, model, others)` that yields pairs (part of the recipe, finding) for
            `pipelinerl check`. `section` is `[engine]` or `[trainer]`, `model` is `[model]`, and `others` are the
            directories of critic, reference and teachers by key of the recipe, empty for an engine. It raises
            `ModelError`, or `SpecError` for options.
        replica: reference of a class `(EngineOptions)` that computes log-probs as the engine does
            (`training.engine_proofs.Replica`), so that the trainer can check an engine whose arithmetic is coarse.
        computes_experts: it computes mixtures of experts.
        reports_routing: it reports the experts of each token.
        reports_policy: it reports log-probs from before top-k and top-p (`policy_logprobs`).
        casts: it computes in another dtype than the model's if the recipe says so.
        use_threads: reference of a function `(int)` that sets the number of compute threads, called on the thread that
            computes; empty if that cannot change while it runs. An engine then has the method `between_steps` of
            `engines.batching.BatchingEngine`.
        cpu_variables: environment variables that keep it off GPUs that its process sees.
        model_type: the only type of model that it serves, held in float32; empty for any Hugging Face model.
    """

    on_host: bool = False
    drives_server: bool = False
    check_options: str = ""
    slow_here: str = ""
    check: str = ""
    replica: str = ""
    computes_experts: bool = True
    reports_routing: bool = False
    reports_policy: bool = False
    casts: bool = False
    use_threads: str = ""
    cpu_variables: Mapping[str, str] = field(default_factory=dict)
    model_type: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerComponent(Component):
    """A trainer; `build` is a class without arguments that implements `Trainer`.

    Attributes:
        on_host: it computes on the CPU even if the machine has GPUs.
        check_options: reference of a function that raises `SpecError` for invalid entries of `trainer.options`, without
            heavy imports; a trainer without it takes no options.
        check, computes_experts, casts, use_threads, cpu_variables, model_type: as for an engine.
        measures_entropy: it measures the entropy over the whole vocabulary without compiling further programs.
        replays_routing: it can use the experts that the engine reports (`trainer.routing_replay`).
    """

    on_host: bool = False
    check_options: str = ""
    check: str = ""
    computes_experts: bool = True
    replays_routing: bool = False
    casts: bool = False
    use_threads: str = ""
    cpu_variables: Mapping[str, str] = field(default_factory=dict)
    model_type: str = ""
    measures_entropy: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshComponent(Component):
    """The several processes of the trainer of the same name; `build` is the class of what computes on rank 0.

    Attributes:
        rank: reference of a function `(options) -> (Distributed | None, Join, Start)` with which a rank above 0 finds,
            joins and follows rank 0; it raises `SpecError`.
        launched: the launcher starts a process for each device of `trainer.options.mesh`.
    """

    rank: str
    launched: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceComponent(Component):
    """A source of problems; `build` is a function `(SourceRequest) -> ProblemSource`.

    In a recipe, the text after the source's name and a colon is the request's argument.

    Attributes:
        look: reference of a function `(SourceRequest, FirstRows, check) -> Problem | None` that inspects the first
            rows; without it, the source is opened for that.
        paths: parameters that are paths.
    """

    look: str = ""
    paths: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierComponent(Component):
    """A verifier; `build` is a function `(section, VerifierContext) -> GroupVerifier`.

    `section` is the domain's table at `key`, or None for a verifier without options.

    Attributes:
        deterministic: it always gives the same verdict on the same answer, so that verdicts can be cached.
        places: options that do not change verdicts, such as the address of a service.
        trial: options that `pipelinerl check` replaces where judging costs money; only one answer is then judged.
        probe: reference of an async function `(section) -> str` that opens the sandbox and returns its tier; it raises
            `UserError` if this machine lacks the sandbox.
        check: reference of a function `(section, problems) -> Iterator[str]` that yields findings on a domain's
            problems for `pipelinerl check`, and raises `RecipeError` for a problem that cannot be judged.
        check_problem: reference of a function `(Problem)` that raises `RecipeError` if it can judge no answer to it.
        reference_answer: reference of a function from a problem to a right answer as a model writes it; without it,
            that is the problem's ground truth.
        needs_reference: its problems must have a reference answer.
    """

    deterministic: bool = False
    places: frozenset[str] = frozenset()
    trial: Mapping[str, Any] | None = None
    probe: str = ""
    check: str = ""
    check_problem: str = ""
    reference_answer: str = ""
    needs_reference: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandComponent(Component):
    """A command of `pipelinerl`; `build` is a function with the command's options, or a typer app of several commands.

    Attributes:
        help: the command's help, which `pipelinerl --help` shows without importing the command.
        hidden: `pipelinerl --help` does not list it.
    """

    help: str
    hidden: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportComponent(Component):
    """A transport of weights; `build` is a function `(Identity, EngineControl, Stream, Grace) -> Publisher`.

    Attributes:
        fetch: reference of a function `(token) -> PullSource`, if engines fetch the weights.
        watch: reference of a function `(RunConfig, EngineClient) -> TransportWatch`, if the controller polls servers.
    """

    fetch: str = ""
    watch: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolComponent(Component):
    """A tool of episodes; `build` is a function `(section, num_workers | None) -> Tool`.

    `section` is the domain's table at `key`, or None for a tool without options.

    Attributes:
        check: reference of a function `(section)` that raises `UserError` if this machine cannot run the tool.
    """

    check: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentComponent(Component):
    """Environments that a recipe names as `name:argument`; `build` is a function `(argument, options) -> Play`.

    `build` raises `ReferenceFailed` if the argument or one of the options is invalid.

    Attributes:
        own_host: `build` returns the command (`list[str]`) of a process instead, which plays the episodes in the
            protocol of `plugins/episodes/episode_host.py`.
        check: reference of a function `(argument, options)` that raises `ReferenceFailed` if episodes cannot be played
            here; without it, `build` is called.
        paths: options that are paths.
    """

    own_host: bool = False
    check: str = ""
    paths: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupComponent(Component):
    """Episodes of the domains with environments; `build` is a function `(config, sampler, verifiers) -> EpisodeMaker`.

    Attributes:
        check: reference of a function `(domain)` that raises `RecipeError` if the domain's episodes cannot be played
            here; it starts nothing.
        trial: reference of an async function `(config, domain, problem, tokenizer)` that plays an episode with a
            scripted model and returns pairs (kind of finding, line); it raises `RecipeError`.
    """

    check: str
    trial: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerComponent(Component):
    """An experiment tracker; `build` is a function `(section, TrackedRun, Bookmark | None) -> Tracker`.

    `section` is its table in `[trackers]`, under its name, or None for a tracker without options.

    Attributes:
        switch: what `trackers.NAME = true` does, for a tracker without options.
    """

    switch: str = ""


class Need(NamedTuple):
    """A line on what a run needs of this machine; `lacking` if the machine has less."""

    part: str
    text: str
    lacking: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedsComponent(Component):
    """A prediction of what a run needs; `build` is a function `(config, limits, directory | None) -> Iterator[Need]`.

    `limits` are bytes of memory by kind of process, `all` for their sum. `directory` is that of a run that is resumed.

    Attributes:
        settle: reference of a function `(config, limits | None) -> config` that replaces `auto` values.
    """

    settle: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyComponent(Component):
    """Plain copies of quantised model directories; `build` is a function `(source) -> Path` that makes or finds one.

    Attributes:
        outline: reference of a context manager `(sources) -> (stand-ins by source, needs)`. A source whose copy exists
            is represented by it, any other until the end of the block by a directory with the copy's shapes.
    """

    outline: str


def missing_packages(component: Component) -> list[str]:
    """Return the packages that the component needs and that are not installed."""
    return [name for name in component.needs if importlib.util.find_spec(name) is None]


def imported(reference: str) -> Any:
    """Return the object named by `module:attribute` or `path.py:attribute`; raise `RecipeError` if that fails."""
    try:
        return load_reference(reference)
    except ReferenceFailed as error:
        raise RecipeError(str(error)) from None
