"""The components that a recipe can name, by kind and name: a line here for each of ours, entry points for others'.

A package adds a component without a fork by an entry point in the group `pipelinerl.components`, whose name is the kind
and the component's name:

    [project.entry-points."pipelinerl.components"]
    "verifier.regex" = "my_package.regex:COMPONENT"

User code needs neither: wherever a name is accepted, so is `package.module:attribute` or `path.py:attribute`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from importlib import metadata
from typing import Any, Final, Generic, TypeVar

from pipelinerl.component import (
    CommandComponent,
    Component,
    CopyComponent,
    EngineComponent,
    EnvironmentComponent,
    GroupComponent,
    MeshComponent,
    NeedsComponent,
    SourceComponent,
    ToolComponent,
    TrackerComponent,
    TrainerComponent,
    TransportComponent,
    VerifierComponent,
    imported,
    missing_packages,
)
from pipelinerl.errors import RecipeError, ReferenceFailed, did_you_mean
from pipelinerl.system.references import is_reference, load_reference

ENTRY_POINTS: Final = "pipelinerl.components"

C = TypeVar("C")
K = TypeVar("K", bound=Component)


@cache
def _entry_points() -> metadata.EntryPoints:
    return metadata.entry_points(group=ENTRY_POINTS)


class Components(Mapping[str, C], Generic[C]):
    """The components of one kind by name, each imported when it is looked up."""

    def __init__(self, kind: str, type: type[C], ours: Mapping[str, str]) -> None:
        self.kind = kind
        self._type = type
        self._ours = ours

    @cached_property
    def _places(self) -> dict[str, str]:
        prefix = f"{self.kind}."
        others = {
            point.name.removeprefix(prefix): point.value for point in _entry_points() if point.name.startswith(prefix)
        }
        return {**self._ours, **{name: place for name, place in others.items() if name not in self._ours}}

    def __getitem__(self, name: str) -> C:
        place = self._places[name]
        try:
            component = load_reference(place)
        except ReferenceFailed as error:
            if name not in self._ours:
                raise RecipeError(f"the {self.kind} {name} of another package cannot be loaded: {error}") from None
            plugin = ".".join(place.partition(":")[0].split(".")[:3])
            raise RecipeError(
                f"the {self.kind} {name} is in the plug-in {plugin}, which this installation lacks; "
                "install pipelinerl with all its files: pip install --force-reinstall pipelinerl"
            ) from None
        if not isinstance(component, self._type):
            raise RecipeError(f"the {self.kind} {name}: {place} must be a {self._type.__name__}")
        return component

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def loadable(self) -> Iterator[tuple[str, C]]:
        """Yield the components by name, without those whose plug-in or package is missing or broken."""
        for name in self:
            with contextlib.suppress(RecipeError):
                yield name, self[name]

    def having(self, trait: str) -> list[str]:
        return [name for name, component in self.loadable() if getattr(component, trait)]


ENGINES: Final = Components(
    "engine",
    EngineComponent,
    {
        "torch": "pipelinerl.engines.torch:COMPONENT",
        "jax": "pipelinerl.plugins.jax:ENGINE",
        "vllm": "pipelinerl.plugins.external_engines.vllm:COMPONENT",
        "vllm_server": "pipelinerl.plugins.external_engines.server:VLLM",
        "sglang_server": "pipelinerl.plugins.external_engines.server:SGLANG",
        "bigram": "pipelinerl.plugins.bigram:ENGINE",
    },
)

TRAINERS: Final = Components(
    "trainer",
    TrainerComponent,
    {
        "torch": "pipelinerl.trainers.torch:COMPONENT",
        "jax": "pipelinerl.plugins.jax:TRAINER",
        "bigram": "pipelinerl.plugins.bigram:TRAINER",
    },
)

#: Trainers of several processes, by the trainer's name.
MESHES: Final = Components(
    "mesh of the trainer",
    MeshComponent,
    {"torch": "pipelinerl.plugins.torch_mesh:COMPONENT", "jax": "pipelinerl.plugins.jax:MESH"},
)

SOURCES: Final = Components(
    "source",
    SourceComponent,
    {
        "reasoning_gym": "pipelinerl.data.generated:REASONING_GYM",
        "addition": "pipelinerl.data.generated:ADDITION",
        "files": "pipelinerl.data.files:FILES",
        "instructions": "pipelinerl.plugins.instructions:SOURCE",
        "programs": "pipelinerl.plugins.oubliette:PROGRAMS",
        "numbered": "pipelinerl.plugins.episodes:NUMBERED",
        "hub": "pipelinerl.plugins.hub:COMPONENT",
    },
)

VERIFIERS: Final = Components(
    "verifier",
    VerifierComponent,
    {
        "math_answer": "pipelinerl.plugins.math_answer:COMPONENT",
        "reasoning_gym": "pipelinerl.verifiers:REASONING_GYM",
        "instruction_following": "pipelinerl.plugins.instructions:VERIFIER",
        "judge": "pipelinerl.plugins.judge:COMPONENT",
        "oubliette": "pipelinerl.plugins.oubliette:VERIFIER",
    },
)

#: Where answers are judged, if not in actors; `build` is a function `(token, patience) -> VerdictServices`.
JUDGED_IN: Final = Components(
    "place of judging", Component, {"services": "pipelinerl.plugins.verifier_service:COMPONENT"}
)

TOOLS: Final = Components("tool", ToolComponent, {"python": "pipelinerl.plugins.oubliette:PYTHON"})

ENVIRONMENTS: Final = Components(
    "environment",
    EnvironmentComponent,
    {
        "openenv": "pipelinerl.plugins.episodes:OPENENV",
        "verifiers": "pipelinerl.plugins.episodes:TASKSETS",
    },
)

#: How groups of rollouts are made that are more than one answer to the prompt.
GROUPS: Final = Components("kind of group", GroupComponent, {"episodes": "pipelinerl.plugins.episodes:EPISODES"})

TRACKERS: Final = Components(
    "tracker",
    TrackerComponent,
    {
        "tensorboard": "pipelinerl.plugins.trackers:TENSORBOARD",
        "wandb": "pipelinerl.plugins.trackers:WANDB",
        "trackio": "pipelinerl.plugins.trackers:TRACKIO",
    },
)

TRANSPORTS: Final = Components(
    "transport",
    TransportComponent,
    {"broadcast": "pipelinerl.roles.broadcast:COMPONENT", "pull": "pipelinerl.plugins.parameter_server:COMPONENT"},
)

#: Resources whose use `pipelinerl check` and `pipelinerl run` predict.
NEEDS: Final = Components("prediction", NeedsComponent, {"memory": "pipelinerl.plugins.memory:COMPONENT"})

#: Components that make plain copies of models with quantised weights.
COPIES: Final = Components("kind of copy", CopyComponent, {"bf16": "pipelinerl.plugins.dequantise:COMPONENT"})

#: What writes the report of a run; `build` is a function `(run_dir) -> list[Path]` that returns its files.
REPORTS: Final = Components("report", Component, {"page": "pipelinerl.plugins.watch:REPORT_PAGE"})

#: Commands of plug-ins, in the order of `pipelinerl --help`; the command line itself has those of the core.
COMMANDS: Final = Components(
    "command",
    CommandComponent,
    {
        "new": "pipelinerl.plugins.new_recipe:COMMAND",
        "dequantise": "pipelinerl.plugins.dequantise:COMMAND",
        "knobs": "pipelinerl.plugins.steering:KNOBS",
        "engines": "pipelinerl.plugins.steering:ENGINES",
        "report": "pipelinerl.plugins.watch:REPORT",
        "samples": "pipelinerl.plugins.watch:SAMPLES",
        "runs": "pipelinerl.plugins.watch:RUNS",
        "compare": "pipelinerl.plugins.watch:COMPARE",
        "eval": "pipelinerl.plugins.evaluation:EVALUATE",
        "prefilter": "pipelinerl.plugins.evaluation:PREFILTER",
        "watch": "pipelinerl.plugins.watch:WATCH",
        "top": "pipelinerl.plugins.watch:TOP",
        "mismatch": "pipelinerl.plugins.watch:MISMATCH",
        "trace": "pipelinerl.plugins.watch:TRACE",
        "track": "pipelinerl.plugins.trackers:TRACK",
        "explain": "pipelinerl.plugins.replay:EXPLAIN",
        "simulate": "pipelinerl.plugins.simulation:COMMAND",
        "bottleneck": "pipelinerl.plugins.simulation:BOTTLENECK",
        "replay": "pipelinerl.plugins.replay:REPLAY",
        "warmstart": "pipelinerl.plugins.warmstart:WARMSTART",
        "sft": "pipelinerl.plugins.warmstart:SFT",
        "conformance": "pipelinerl.plugins.conformance:CONFORMANCE",
        "bench": "pipelinerl.plugins.conformance:BENCH",
        "chaos": "pipelinerl.plugins.conformance:CHAOS",
        "sandbox": "pipelinerl.plugins.oubliette:COMMAND",
        "oubliette": "pipelinerl.plugins.oubliette:EARLIER_COMMAND",
    },
)

#: Roles of plug-ins, by subcommand: values of `pipelinerl.roles.role.Role`. `roles/catalogue.py` has those of the core.
ROLES: Final = Components[Any](
    "role",
    object,
    {
        "parameter-server": "pipelinerl.plugins.parameter_server:ROLE",
        "verifier": "pipelinerl.plugins.verifier_service:ROLE",
        "tracker": "pipelinerl.plugins.trackers:ROLE",
    },
)


def has_own_type(model_type: str) -> bool:
    """Return True if only the components of this `model_type` serve such a model, which is no Hugging Face model."""
    return bool(model_type) and any(each.model_type == model_type for _, each in TRAINERS.loadable())


def is_user_code(components: Mapping[str, Component], name: str) -> bool:
    """Return True if the name is a reference to user code instead of a registered name."""
    return name not in components and is_reference(name)


def known(where: str, components: Mapping[str, K], name: str) -> K | None:
    """Return the component `name`; None for a reference to user code. Raises `RecipeError`, naming the key `where`."""
    if is_user_code(components, name):
        return None
    if name not in components:
        raise RecipeError(
            f"{where} must be one of {', '.join(components)}, got {name!r}; name your own code as "
            f"package.module:attribute or path.py:attribute{did_you_mean(name, components)}"
        )
    return components[name]


def find(where: str, components: Mapping[str, K], name: str) -> K | None:
    """Return the component like `known`. User code is imported to check it; what a component builds is not imported.

    Raises:
        RecipeError: the name is unknown, a package that it needs is missing, or the user's code cannot be loaded.
    """
    component = known(where, components, name)
    if component is None:
        _user_code(where, name)
    elif missing := missing_packages(component):
        raise RecipeError(f"{where} {name!r} needs {', '.join(missing)}, which is not installed; {component.remedy}")
    return component


def load(where: str, components: Mapping[str, K], name: str) -> Any:
    """Return the function or class that builds `name`, or the user code of this reference; raises like `find`."""
    component = find(where, components, name)
    return _user_code(where, name) if component is None else imported(component.build)


def _user_code(where: str, name: str) -> Any:
    try:
        thing = load_reference(name)
    except ReferenceFailed as error:
        raise RecipeError(f"{where}: {error}") from None
    if not callable(thing):
        raise RecipeError(f"{where}: {name} must be a function or a class, got {type(thing).__name__}")
    return thing
