"""`RunConfig`: a run, as a TOML recipe. Read once, resolved, validated, frozen.

A recipe may begin with `base = "other.toml"` (a path beside it, or the name of a shipped recipe) and change only what
differs. Overrides `section.key=value` come last. Every error names the path of the field; types are never guessed: text
is no number, `true` is no 1, and no number is infinite but k.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import tomli_w
from pydantic import Field, ValidationError, field_validator, model_validator

from inference_contract.schemas import Backend, Transport
from pipelinerl.config.learning import (
    CriticSection,
    KLControlSection,
    ReferenceSection,
    RewardSection,
    TrainingSection,
)
from pipelinerl.config.sections import (
    MODELS,
    ActorSection,
    CheckpointSection,
    EngineSection,
    EvaluationSection,
    LaunchSection,
    ModelSection,
    OptimizerSection,
    ParameterServerSection,
    RunSection,
    SamplingSection,
    Section,
    StalenessSection,
    StreamsSection,
    TrainerSection,
    WeightsSection,
)
from pipelinerl.errors import RecipeError
from trainer_contract.types import Device

__all__ = ["MODELS", "RECIPES", "RunConfig", "load", "parse", "save", "to_table", "write_private"]

RECIPES = Path(__file__).resolve().parents[2] / "launch" / "recipes"


class DomainSection(Section):
    """A kind of problem: where its problems come from, what verifies them, and its share of the mixture."""

    name: str
    source: str
    verifier: str = "math_answer"
    weight: float = Field(default=1.0, gt=0)
    parameters: dict[str, Any] = Field(default_factory=dict)
    reward: RewardSection | None = None


class RunConfig(Section):
    """A whole run."""

    model: ModelSection
    domains: tuple[DomainSection, ...]
    run: RunSection = RunSection()
    objective: str | dict[str, Any] = "pipelinerl"
    engine: EngineSection = EngineSection()
    actor: ActorSection = ActorSection()
    sampling: SamplingSection = SamplingSection()
    optimizer: OptimizerSection = OptimizerSection()
    trainer: TrainerSection = TrainerSection()
    training: TrainingSection = TrainingSection()
    critic: CriticSection | None = None
    kl_control: KLControlSection | None = None
    reference: ReferenceSection | None = None
    staleness: StalenessSection = StalenessSection()
    evaluation: EvaluationSection = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    streams: StreamsSection = StreamsSection()
    weights: WeightsSection = WeightsSection()
    parameter_server: ParameterServerSection = ParameterServerSection()
    launch: LaunchSection = LaunchSection()

    @field_validator("objective", mode="before")
    @classmethod
    def _name_or_table(cls, objective: Any) -> Any:
        if not isinstance(objective, str | dict):
            raise ValueError(f"must be the name of a preset or a table, got {objective!r}")
        return objective

    @field_validator("domains")
    @classmethod
    def _domain_names_unique(cls, domains: tuple[DomainSection, ...]) -> tuple[DomainSection, ...]:
        names = [domain.name for domain in domains]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"must be one or more with names of their own, got {', '.join(names) or 'none'}")
        return domains

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.training.rollouts_per_step % self.sampling.group_size:
            raise ValueError(
                f"training.rollouts_per_step ({self.training.rollouts_per_step}) must be a multiple of "
                f"sampling.group_size ({self.sampling.group_size})"
            )
        if self.groups_per_step > self.streams.max_groups:
            raise ValueError(
                f"streams.max_groups ({self.streams.max_groups}) must be at least the {self.groups_per_step} groups of "
                "a step (training.rollouts_per_step / sampling.group_size): a step could never be filled"
            )
        if self.engine.max_waiting < self.sampling.group_size:
            raise ValueError(
                f"engine.max_waiting ({self.engine.max_waiting}) must be at least sampling.group_size "
                f"({self.sampling.group_size}): an engine would refuse every group"
            )
        for path, tokens in (
            ("sampling.max_tokens", self.sampling.max_tokens),
            ("evaluation.max_tokens", self.evaluation_max_tokens),
        ):
            if tokens >= self.engine.context_length:
                raise ValueError(
                    f"{path} ({tokens}) must be below engine.context_length ({self.engine.context_length}): the prompt "
                    "needs room too"
                )
        if self.weights.backend is Backend.NCCL and Device.CPU in (self.trainer.device, self.engine.device):
            raise ValueError(
                f'weights.backend = "nccl" goes from GPU to GPU, trainer.device is {self.trainer.device} and '
                f"engine.device {self.engine.device}"
            )
        return self

    @property
    def run_directory(self) -> Path:
        """Where this run writes."""
        return self.run.directory.expanduser() / self.run.name

    @property
    def groups_per_step(self) -> int:
        """Groups that make a step."""
        return self.training.rollouts_per_step // self.sampling.group_size

    @property
    def servers_to_start(self) -> int:
        """Parameter servers that the launcher starts: where weights are pulled, and none is named."""
        wanted = self.weights.transport is Transport.PULL and not self.parameter_server.urls
        return self.parameter_server.shards * self.parameter_server.replicas if wanted else 0

    @property
    def evaluation_max_tokens(self) -> int:
        """Most tokens of a held-out answer."""
        return self.evaluation.max_tokens or self.sampling.max_tokens


def load(recipe: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe file (or the name of a shipped one) and apply `section.key=value` overrides.

    Raises:
        RecipeError: with the path of the field, what was expected and what came.
    """
    table = _read(_locate(str(recipe), beside=None))
    for override in overrides:
        _apply(table, override)
    return parse(table)


def parse(table: Mapping[str, Any]) -> RunConfig:
    """Validate a resolved table.

    Raises:
        RecipeError: a line for each field that is wrong.
    """
    try:  # through JSON, in which pydantic takes words for enums and lists for tuples without guessing at numbers
        return RunConfig.model_validate_json(json.dumps(table, default=str))
    except ValidationError as error:
        raise RecipeError(_sentences(error)) from None


def _locate(recipe: str, *, beside: Path | None) -> Path:
    candidates = [Path(recipe), RECIPES / f"{recipe}.toml", RECIPES / recipe]
    if beside is not None:
        candidates.insert(0, beside.parent / recipe)
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        shipped = ", ".join(sorted(path.stem for path in RECIPES.glob("*.toml")))
        raise RecipeError(f"recipe {recipe!r} is neither a file nor a shipped recipe; shipped are: {shipped}")
    return found


def _read(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The table of a recipe file, on those of its bases; `above` are the files that led here."""
    if path.resolve() in above:
        raise RecipeError(f"{path}: base leads back to this file; end the chain with a recipe that has no base")
    try:
        table = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror}") from None
    base = table.pop("base", None)
    if base is None:
        return table
    return _merge(_read(_locate(str(base), beside=path), (*above, path.resolve())), table)


def _merge(base: dict[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in change.items():
        both_tables = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both_tables else value
    return merged


def _apply(table: dict[str, Any], override: str) -> None:
    path, separator, text = override.partition("=")
    if not separator or not path.strip():
        raise RecipeError(f"an override must read section.key=value, got {override!r}")
    *sections, key = path.strip().split(".")
    node = table
    for section in sections:
        child = node.setdefault(section, {})
        if not isinstance(child, dict):
            raise RecipeError(f"{path.strip()}: {section} is not a table")
        node = child
    node[key] = _literal(text.strip())


def _literal(text: str) -> Any:
    """A TOML value, or the text itself when it is not one, so that shells need no double quoting."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _sentences(error: ValidationError) -> str:
    lines = []
    for problem in error.errors(include_url=False, include_context=False):
        path = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            message = "unknown key; remove it or correct its spelling"
        elif problem["type"] == "missing":
            message = "must be given"
        elif problem["type"] != "value_error":
            message = f"{message}, got {problem['input']!r}"
        elif message.startswith(path):
            path = ""  # a finding on several fields names them itself
        lines.append(f"{path}: {message}" if path else message)
    return "\n".join(lines)


def to_table(config: RunConfig) -> dict[str, Any]:
    """The resolved recipe as plain TOML values; keys that are None are left out."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items() if item is not None}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return str(value) if isinstance(value, Path) else value

    table: dict[str, Any] = plain(config.model_dump(mode="python"))
    bounds = config.staleness.bounds
    table["staleness"] = {"j": bounds.j, "k": bounds.k if math.isinf(bounds.k) else int(bounds.k)}
    return table


def save(config: RunConfig, path: Path) -> None:
    """Write the resolved recipe, whole: no base, no overrides. It may hold a secret, and is its owner's only."""
    write_private(path, tomli_w.dumps(to_table(config)))


def write_private(path: Path, text: str) -> None:
    """Write a file that its owner alone may read, in place of what was there."""
    path.unlink(missing_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(file, "w") as stream:
        stream.write(text)
