"""Registry of pluggable components by name. A new component needs its file and one line here; tests then cover it.

Values are `module:attribute`, imported only when used. User code needs no entry: wherever a name is accepted, so is
`package.module:attribute` or `path.py:attribute`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pipelinerl.errors import RecipeError, ReferenceFailed, did_you_mean
from pipelinerl.system.references import is_reference, load_reference


@dataclass(frozen=True, slots=True)
class RegistryEntry:
    """The location of an implementation, the packages it needs, and how to install them."""

    target: str
    needs: tuple[str, ...] = ()
    remedy: str = "pip install it"

    @property
    def installed(self) -> bool:
        """True if the packages that the implementation needs are installed."""
        return all(importlib.util.find_spec(name) is not None for name in self.needs)


_JAX: Final = "pip install -e '.[jax]'"
_VLLM: Final = "its dependencies conflict with ours; make vllm builds an environment of its own, docs/use/vllm.md"

#: Engines by name: functions `from_options(EngineOptions) -> Engine`.
ENGINES: Final[Mapping[str, RegistryEntry]] = {
    "torch": RegistryEntry("pipelinerl.engines.torch.engine:from_options", ("torch", "transformers")),
    "jax": RegistryEntry("pipelinerl.plugins.jax.engine.engine:from_options", ("jax",), _JAX),
    "vllm": RegistryEntry(
        "pipelinerl.plugins.external_engines.vllm.engine:from_options", ("vllm", "torch", "transformers"), _VLLM
    ),
    "vllm_server": RegistryEntry(
        "pipelinerl.plugins.external_engines.server.engine:vllm_server", ("torch", "transformers")
    ),
    "sglang_server": RegistryEntry(
        "pipelinerl.plugins.external_engines.server.engine:sglang_server", ("torch", "transformers")
    ),
    "bigram": RegistryEntry("pipelinerl.engines.bigram.engine:from_options"),
}

#: Engines that forward requests to an inference server that the user runs (`engine.servers`).
SERVER_ENGINES: Final = frozenset({"vllm_server", "sglang_server"})

#: Engines and trainers that compute on the CPU even if the machine has GPUs.
ON_THE_HOST: Final = SERVER_ENGINES | {"bigram"}

#: Engines that take `engine.options`, each with a function that rejects options which other keys of the recipe set.
ENGINES_WITH_OPTIONS: Final[Mapping[str, str]] = {"vllm": "pipelinerl.plugins.external_engines.vllm.limits:check_names"}

#: Trainers by name: classes without arguments that implement `Trainer`.
TRAINERS: Final[Mapping[str, RegistryEntry]] = {
    "torch": RegistryEntry("pipelinerl.trainers.torch.trainer:TorchTrainer", ("torch", "transformers", "accelerate")),
    "jax": RegistryEntry("pipelinerl.plugins.jax.trainer.trainer:JaxTrainer", ("jax", "optax", "tensorstore"), _JAX),
    "bigram": RegistryEntry("pipelinerl.trainers.bigram.trainer:BigramTrainer"),
}

#: Trainers that take `trainer.options`.
TRAINERS_WITH_OPTIONS: Final = frozenset({"torch", "jax"})
#: For some trainers, a function that validates the trainer's options before a run starts, without heavy imports.
TRAINER_OPTION_CHECKS: Final[Mapping[str, str]] = {
    "torch": "pipelinerl.trainers.torch.options:options_of",
    "jax": "pipelinerl.trainers.option_table:refuse_lora",
}

#: Engine types that report the experts of each token, and trainer types that replay these experts
#: (`trainer.routing_replay`).
TELLS_ROUTING: Final = frozenset({"torch"})
REPLAYS_ROUTING: Final = frozenset({"torch"})

#: Engine types that report log-probs from before top-k and top-p (`policy_logprobs`). vLLM reports log-probs either
#: after top-k and top-p or before the temperature.
TELLS_POLICY: Final = frozenset({"torch", "jax", "bigram", "sglang_server"})

#: Problem sources by name: functions `(SourceRequest) -> ProblemSource`. In the recipe, the text after the colon
#: becomes the request's argument.
SOURCES: Final[Mapping[str, RegistryEntry]] = {
    "reasoning_gym": RegistryEntry("pipelinerl.data.generated:open_reasoning_gym", ("reasoning_gym",)),
    "addition": RegistryEntry("pipelinerl.data.generated:open_addition"),
    "files": RegistryEntry("pipelinerl.data.files.source:open_files"),
    "instructions": RegistryEntry("pipelinerl.plugins.instructions.source:open_instructions"),
    "programs": RegistryEntry("pipelinerl.data.generated:open_programs"),
    "numbered": RegistryEntry("pipelinerl.data.generated:open_numbered"),
    "hub": RegistryEntry("pipelinerl.data.files.hub:open_hub", ("huggingface_hub",), "pip install -e '.[hub]'"),
}

#: For some sources, a function that inspects the first rows: `(SourceRequest, FirstRows, check) -> Problem | None`.
LOOKS: Final[Mapping[str, str]] = {
    "files": "pipelinerl.data.files.hub:look_at_files",
    "hub": "pipelinerl.data.files.hub:look_at_hub",
}

#: Verifiers by name: classes that implement `Verifier`; `roles/verification.py` constructs them.
VERIFIERS: Final[Mapping[str, RegistryEntry]] = {
    "math_answer": RegistryEntry("pipelinerl.verifiers.math_answer:MathAnswer"),
    "reasoning_gym": RegistryEntry("pipelinerl.verifiers.reasoning_gym:ReasoningGym", ("reasoning_gym",)),
    "instruction_following": RegistryEntry("pipelinerl.plugins.instructions.verifier:InstructionFollowing"),
    "judge": RegistryEntry("pipelinerl.plugins.judge.verifier:Judge"),
    "oubliette": RegistryEntry("pipelinerl.plugins.oubliette.verifier:Oubliette"),
}

#: For some verifiers, a function `(Problem)` that raises `RecipeError` if the verifier can judge no answer to it.
PROBLEM_CHECKS: Final[Mapping[str, str]] = {
    "math_answer": "pipelinerl.verifiers.math_answer:refuse_unreadable",
    "reasoning_gym": "pipelinerl.verifiers.reasoning_gym:entry_of",
    "instruction_following": "pipelinerl.plugins.instructions.verifier:instructions_of_problem",
    "oubliette": "pipelinerl.plugins.oubliette.verifier:refuse_unreadable",
}

#: For some verifiers, a function from a problem to a right answer as a model writes it; else that is the ground truth.
REFERENCE_ANSWERS: Final[Mapping[str, str]] = {"math_answer": "pipelinerl.verifiers.math_answer:boxed_reference"}

#: Verifiers that need no reference answer, so their problems may lack one.
WITHOUT_REFERENCE: Final = frozenset({"instruction_following", "judge", "oubliette"})


def is_user_code(entries: Mapping[str, RegistryEntry], name: str) -> bool:
    """Return True if the name is a reference to user code instead of a registered name."""
    return name not in entries and is_reference(name)


def known(kind: str, entries: Mapping[str, RegistryEntry], name: str) -> RegistryEntry:
    """Return the entry that is registered as `name`; for a reference to user code, return a new entry.

    User code is not loaded. Raises `RecipeError` if the name is unknown.
    """
    if is_user_code(entries, name):
        return RegistryEntry(name)
    if name not in entries:
        raise RecipeError(
            f"{kind} must be one of {', '.join(entries)}, got {name!r}; name your own code as "
            f"package.module:attribute or path.py:attribute{did_you_mean(name, entries)}"
        )
    return entries[name]


def find(kind: str, entries: Mapping[str, RegistryEntry], name: str) -> RegistryEntry:
    """Return the entry of `name`. User code is imported to check it; a registered component is not imported.

    Raises:
        RecipeError: the name is unknown, a package that it needs is missing, or the user's code cannot be loaded.
    """
    entry = known(kind, entries, name)
    missing = [package for package in entry.needs if importlib.util.find_spec(package) is None]
    if missing:
        raise RecipeError(f"{kind} {name!r} needs {', '.join(missing)}, which is not installed; {entry.remedy}")
    if is_user_code(entries, name):
        _user_code(kind, name)
    return entry


def load(kind: str, entries: Mapping[str, RegistryEntry], name: str) -> Any:
    """Return the component named `name`, which is registered or a reference to user code; raises like `find`."""
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
    """Return the object named by `module:attribute` or `path.py:attribute`; raise `RecipeError` if that fails."""
    try:
        return load_reference(target)
    except ReferenceFailed as error:
        raise RecipeError(str(error)) from None
