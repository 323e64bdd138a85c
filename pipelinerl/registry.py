"""What can be plugged in, by name. To add one: write its file and one line here; the conformance tests find it.

Values are `module:attribute`, imported only when chosen, so that reading the registry needs none of the libraries. A
user adds without a line here: wherever a name may stand, `package.module:attribute` or `path.py:attribute` may.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pipelinerl.errors import RecipeError, ReferenceFailed
from pipelinerl.system.references import is_reference, load_reference


@dataclass(frozen=True, slots=True)
class RegistryEntry:
    """Where an implementation lives, the top-level packages that it needs installed, and how they are had."""

    target: str
    needs: tuple[str, ...] = ()
    remedy: str = "pip install it"

    @property
    def installed(self) -> bool:
        """Are the packages it needs there?"""
        return all(importlib.util.find_spec(name) is not None for name in self.needs)


_JAX: Final = "pip install 'pipelinerl[jax]'"
_VLLM: Final = "its pins clash with ours, so it has an environment of its own: make vllm builds it, docs/vllm.md"

#: `from_options(EngineOptions) -> Engine`
ENGINES: Final[Mapping[str, RegistryEntry]] = {
    "torch": RegistryEntry("pipelinerl.engines.torch.engine:from_options", ("torch", "transformers")),
    "jax": RegistryEntry("pipelinerl.engines.jax.engine:from_options", ("jax",), _JAX),
    "vllm": RegistryEntry(
        "pipelinerl.engines.external.vllm.engine:from_options", ("vllm", "torch", "transformers"), _VLLM
    ),
    "vllm_server": RegistryEntry("pipelinerl.engines.external.server.engine:vllm_server", ("torch", "transformers")),
    "sglang_server": RegistryEntry(
        "pipelinerl.engines.external.server.engine:sglang_server", ("torch", "transformers")
    ),
    "bigram": RegistryEntry("pipelinerl.engines.bigram.engine:from_options"),
}

#: Engines that stand for a server that somebody runs (`engine.servers`).
SERVER_ENGINES: Final = frozenset({"vllm_server", "sglang_server"})

#: Engines and trainers whose process computes on the host alone, whatever GPUs there are.
ON_THE_HOST: Final = SERVER_ENGINES | {"bigram"}

#: Engines that know options of their own (`engine.options`), with what refuses those that the recipe sets elsewhere.
ENGINES_WITH_OPTIONS: Final[Mapping[str, str]] = {"vllm": "pipelinerl.engines.external.vllm.options:check_names"}

#: A class without arguments that satisfies `Trainer`.
TRAINERS: Final[Mapping[str, RegistryEntry]] = {
    "torch": RegistryEntry("pipelinerl.trainers.torch.trainer:TorchTrainer", ("torch", "transformers", "accelerate")),
    "jax": RegistryEntry("pipelinerl.trainers.jax.trainer:JaxTrainer", ("jax", "optax", "tensorstore"), _JAX),
    "bigram": RegistryEntry("pipelinerl.trainers.bigram.trainer:BigramTrainer"),
}

#: Trainers that know options of their own (`trainer.options`).
TRAINERS_WITH_OPTIONS: Final = frozenset({"torch", "jax"})
#: Of some of them, what refuses options before a run is started, without importing anything heavy.
TRAINER_OPTION_CHECKS: Final[Mapping[str, str]] = {
    "torch": "pipelinerl.trainers.torch.options:checked",
    "jax": "pipelinerl.trainers.option_table:refuse_lora",
}

#: Engines that tell which experts computed a token, and trainers that replay it (`trainer.routing_replay`).
TELLS_ROUTING: Final = frozenset({"torch"})
REPLAYS_ROUTING: Final = frozenset({"torch"})

#: `(SourceRequest) -> ProblemSource`; what a recipe says after a colon is the request's argument.
SOURCES: Final[Mapping[str, RegistryEntry]] = {
    "reasoning_gym": RegistryEntry("pipelinerl.data.generated:open_reasoning_gym", ("reasoning_gym",)),
    "addition": RegistryEntry("pipelinerl.data.generated:open_addition"),
    "files": RegistryEntry("pipelinerl.data.files.source:open_files"),
    "instructions": RegistryEntry("pipelinerl.data.instructed:open_instructions"),
    "programs": RegistryEntry("pipelinerl.data.programs:open_programs"),
    "hub": RegistryEntry("pipelinerl.data.files.hub:open_hub", ("huggingface_hub",), "pip install 'pipelinerl[hub]'"),
}

#: Of sources that read rows, what looks at the first of them: `(SourceRequest, FirstRows, check) -> Problem | None`.
LOOKS: Final[Mapping[str, str]] = {
    "files": "pipelinerl.data.files.first_rows:look_at_files",
    "hub": "pipelinerl.data.files.hub:look_at_hub",
}

#: A class that satisfies `Verifier`; `roles/verification.py` says what it is made with.
VERIFIERS: Final[Mapping[str, RegistryEntry]] = {
    "math_answer": RegistryEntry("pipelinerl.verifiers.math_answer:MathAnswer"),
    "reasoning_gym": RegistryEntry("pipelinerl.verifiers.reasoning_gym:ReasoningGym", ("reasoning_gym",)),
    "instruction_following": RegistryEntry("pipelinerl.verifiers.instruction_following:InstructionFollowing"),
    "judge": RegistryEntry("pipelinerl.verifiers.judge.judge:Judge"),
    "oubliette": RegistryEntry("pipelinerl.verifiers.oubliette.verifier:Oubliette"),
}

#: Of some of them, what refuses a problem that no answer could be judged by: `(Problem)`, raises `RecipeError`.
PROBLEM_CHECKS: Final[Mapping[str, str]] = {
    "math_answer": "pipelinerl.verifiers.math_answer:refuse_unreadable",
    "reasoning_gym": "pipelinerl.verifiers.reasoning_gym:entry_of",
    "instruction_following": "pipelinerl.verifiers.instruction_following:instructions_of_problem",
    "oubliette": "pipelinerl.verifiers.oubliette.verifier:refuse_unreadable",
}

#: Verifiers that do not compare with a reference answer, which their problems may lack.
WITHOUT_REFERENCE: Final = frozenset({"instruction_following", "judge", "oubliette"})


def is_user_code(entries: Mapping[str, RegistryEntry], name: str) -> bool:
    """Is a part named by a reference to a user's code, and not by a registered name?"""
    return name not in entries and is_reference(name)


def known(kind: str, entries: Mapping[str, RegistryEntry], name: str) -> RegistryEntry:
    """The entry registered as `name`, or that of a reference, whether or not it could be loaded here.

    Raises:
        RecipeError: the name is unknown.
    """
    if is_user_code(entries, name):
        return RegistryEntry(name)
    if name not in entries:
        raise RecipeError(
            f"{kind} must be one of {', '.join(entries)}, got {name!r}; code of your own is named as "
            "package.module:attribute or path.py:attribute"
        )
    return entries[name]


def find(kind: str, entries: Mapping[str, RegistryEntry], name: str) -> RegistryEntry:
    """The entry of `name`; of what is registered nothing is imported, a user's code is.

    Raises:
        RecipeError: the name is unknown, a package that it needs is not installed, or the user's code cannot be loaded.
    """
    entry = known(kind, entries, name)
    missing = [package for package in entry.needs if importlib.util.find_spec(package) is None]
    if missing:
        raise RecipeError(f"{kind} {name!r} needs {', '.join(missing)}, which is not installed; {entry.remedy}")
    if is_user_code(entries, name):
        _user_code(kind, name)
    return entry


def load(kind: str, entries: Mapping[str, RegistryEntry], name: str) -> Any:
    """What `name` stands for, registered or a reference; raises as `find` does."""
    if is_user_code(entries, name):
        return _user_code(kind, name)
    return resolve(find(kind, entries, name).target)


def _user_code(kind: str, name: str) -> Any:
    try:
        thing = load_reference(name)
    except ReferenceFailed as error:
        raise RecipeError(f"{kind}: {error}") from None
    if not callable(thing):
        raise RecipeError(f"{kind}: {name} must be a function or a class, got {type(thing).__name__}")
    return thing


def resolve(target: str) -> Any:
    """The object that `module:attribute` or `path.py:attribute` names.

    Raises:
        RecipeError: the form is wrong, or it cannot be loaded.
    """
    try:
        return load_reference(target)
    except ReferenceFailed as error:
        raise RecipeError(str(error)) from None
