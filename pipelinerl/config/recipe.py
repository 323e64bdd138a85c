"""`RunConfig`: a run as a TOML recipe. Read once, resolved, validated, frozen.

A recipe may begin with `base = "other.toml"` (a path relative to the recipe, or the name of a shipped recipe) and then
contains only the differences from that base. Overrides `section.key=value` are applied last; `layers.py` defines how
layers combine. Every error names the path of the field. Types are strict: text is not converted to numbers, `true` is
not 1, and numbers must be finite except k.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import tomli_w
from pydantic import SecretStr, ValidationError, field_validator, model_validator

from inference_contract.weights import Backend, Transport
from pipelinerl import registry
from pipelinerl.config import learning, sections
from pipelinerl.config.domains import DomainSection
from pipelinerl.config.evaluation import EvaluationSection, EvaluationSet, EvaluationSetSection
from pipelinerl.config.layers import (
    merged,
    overridden,
    refuse_absent_plugins,
    refuse_unwritable,
    resolved_beside,
    sentences,
)
from pipelinerl.config.sections import MODELS
from pipelinerl.data.mixture import groups_of_step
from pipelinerl.enums import RoutingReplay
from pipelinerl.errors import RecipeError, UserError, did_you_mean
from pipelinerl.messages import LAYOUT, layout_refusal
from pipelinerl.observability.logs import without_secrets
from pipelinerl.section import Section
from pipelinerl.staleness import AUTO
from pipelinerl.system.files import from_home, working_directory, write_private
from trainer_contract.types import Device

__all__ = ["MODELS", "RECIPES", "RunConfig", "load", "parse", "save", "to_table"]

RECIPES = Path(__file__).resolve().parents[2] / "launch" / "recipes"


class RunConfig(Section):
    """A run as described by its recipe, with one section for each part."""

    model: sections.ModelSection
    domains: tuple[DomainSection, ...]
    run: sections.RunSection = sections.RunSection()
    objective: str | dict[str, Any] = "pipelinerl"
    """A preset's name, or a table of slots (loss terms) that may start from a `preset`; see `pipelinerl explain`."""
    engine: sections.EngineSection = sections.EngineSection()
    elastic: sections.ElasticSection = sections.ElasticSection()
    actor: sections.ActorSection = sections.ActorSection()
    sampling: sections.SamplingSection = sections.SamplingSection()
    optimizer: sections.OptimizerSection = sections.OptimizerSection()
    trainer: sections.TrainerSection = sections.TrainerSection()
    training: learning.TrainingSection = learning.TrainingSection()
    critic: learning.CriticSection | None = None
    kl_control: learning.KLControlSection | None = None
    reference: learning.ReferenceSection | None = None
    staleness: sections.StalenessSection = sections.StalenessSection()
    evaluation: EvaluationSection = EvaluationSection()
    evaluations: tuple[EvaluationSetSection, ...] = ()
    curation: learning.CurationSection = learning.CurationSection()
    verification: sections.VerificationSection = sections.VerificationSection()
    checkpoint: sections.CheckpointSection = sections.CheckpointSection()
    streams: sections.StreamsSection = sections.StreamsSection()
    weights: sections.WeightsSection = sections.WeightsSection()
    parameter_server: sections.ParameterServerSection = sections.ParameterServerSection()
    samples: sections.SamplesSection = sections.SamplesSection()
    figures: sections.FiguresSection = sections.FiguresSection()
    trackers: sections.TrackersSection = sections.TrackersSection()
    launch: sections.LaunchSection = sections.LaunchSection()

    @property
    def key_variables(self) -> set[str]:
        """The environment variables that hold keys of domains' verifiers, such as those of judges."""
        options = [value for domain in self.domains for _, value in domain if isinstance(value, Section)]
        return {name for each in options if (name := getattr(each, "key_variable", None))}

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
            raise ValueError(f"must be one or more domains with unique names, got {', '.join(names) or 'none'}")
        if not any(domain.weight for domain in domains):
            raise ValueError("must give at least one domain a weight above 0, or there is nothing to train on")
        if not any(domain.is_sampled for domain in domains):
            raise ValueError(
                'must have a loss other than "ce" in one domain at least; `pipelinerl sft` trains on demonstrations '
                "alone"
            )
        return domains

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        self._check_group_sizes()
        played = next((domain.name for domain in self.domains if domain.has_environment), None)
        if played is not None and self.trainer.routing_replay is RoutingReplay.ROLLOUT:
            raise ValueError(
                f'trainer.routing_replay "rollout" does not support episodes, which domain {played} has; turn it off'
            )
        self._check_evaluations()
        for path, tokens in (
            ("sampling.max_tokens", self.sampling.max_tokens),
            ("evaluation.max_tokens", self.evaluation.max_tokens),
            *((f"evaluations.{each.name}.max_tokens", each.max_tokens) for each in self.evaluations),
            *((f"domains.{domain.name}.max_tokens", domain.max_tokens) for domain in self.domains),
        ):
            if tokens is not None and tokens >= self.engine.context_length:
                raise ValueError(
                    f"{path} ({tokens}) must be below engine.context_length ({self.engine.context_length}): the prompt "
                    "needs room too"
                )
        if self.weights.backend is Backend.NCCL and Device.CPU in (self.trainer.device, self.engine.device):
            raise ValueError(
                f'weights.backend = "nccl" needs GPUs, but trainer.device is {self.trainer.device} and '
                f"engine.device {self.engine.device}"
            )
        return self

    def _check_group_sizes(self) -> None:
        rollouts, trained = self.training.rollouts_per_step, self.trained_domains
        smallest, largest = min(trained, key=self.group_size_of), max(trained, key=self.group_size_of)
        says, size = self.key_of_group_size(largest), self.group_size_of(largest)
        if size == self.group_size_of(smallest) and rollouts % size:
            raise ValueError(f"training.rollouts_per_step ({rollouts}) must be a multiple of {says} ({size})")
        if rollouts < size:
            raise ValueError(f"training.rollouts_per_step ({rollouts}) must be at least {says} ({size})")
        if self.training.mini_batches > self.groups_per_step:
            raise ValueError(
                f"training.mini_batches ({self.training.mini_batches}) must be at most the {self.groups_per_step} "
                f"groups of a step (training.rollouts_per_step / {says}): each mini-batch holds whole groups"
            )
        if (groups := math.ceil(rollouts / self.group_size_of(smallest))) > self.streams.max_groups:
            raise ValueError(
                f"streams.max_groups ({self.streams.max_groups}) must be at least the {groups} groups of a step "
                f"(training.rollouts_per_step / {self.key_of_group_size(smallest)}): a step could never be filled"
            )
        if self.engine.max_waiting < size:
            raise ValueError(
                f"engine.max_waiting ({self.engine.max_waiting}) must be at least {says} ({size}): an engine would "
                "refuse every group"
            )

    def _check_evaluations(self) -> None:
        names, domains = [each.name for each in self.evaluations], [domain.name for domain in self.domains]
        if len(set(names)) != len(names):
            raise ValueError(f"evaluations must have unique names, got {', '.join(names)}")
        for each in self.evaluations:
            if unknown := [name for name in each.domains if name not in domains]:
                raise ValueError(
                    f"evaluations.{each.name}.domains names {', '.join(unknown)}; domains are {', '.join(domains)}"
                )
            for domain in self.domains:
                if domain.name in each.domains and not (domain.has_verifier or domain.has_environment):
                    raise ValueError(
                        f"evaluations.{each.name}.domains names {domain.name}, whose answers nothing judges; give it a "
                        "verifier"
                    )
        for asked in self.evaluation_sets if self.evaluations else ():
            for sentence in asked.faults(f"evaluations.{asked.name}"):
                raise ValueError(sentence)

    @property
    def trained_domains(self) -> tuple[DomainSection, ...]:
        """Domains that train on answers sampled during the run."""
        return tuple(domain for domain in self.domains if domain.is_sampled)

    @property
    def demonstrated_domains(self) -> tuple[DomainSection, ...]:
        """Domains that train on right answers from the data (demonstrations) instead of sampled answers."""
        return tuple(domain for domain in self.domains if domain.weight and not domain.is_sampled)

    @property
    def demonstrations_per_update(self) -> int:
        """The number of demonstrations (right answers from the data) per optimizer step; 0 if no domain trains on them.

        The ratio of demonstrations to sampled groups is the ratio of their domains' weights.
        """
        shares = [sum(each.weight for each in those) for those in (self.demonstrated_domains, self.trained_domains)]
        groups = self.groups_per_step / self.training.mini_batches
        return max(1, round(groups * shares[0] / shares[1])) if shares[0] else 0

    @property
    def evaluation_sets(self) -> tuple[EvaluationSet, ...]:
        """The evaluation sets, in the recipe's order; `run.until_accuracy` refers to the first set."""
        trained = [domain.name for domain in self.trained_domains]
        several = enumerate(self.evaluations)
        sets = tuple(each.within(self.evaluation, place=place, domains=trained) for place, each in several)
        return sets or (self.evaluation.alone(trained),)

    @property
    def run_directory(self) -> Path:
        return from_home(self.run.directory) / self.run.name

    @property
    def groups_per_step(self) -> int:
        """The number of groups in a step; an average if group sizes differ."""
        return groups_of_step(
            self.training.rollouts_per_step,
            {domain.name: self.group_size_of(domain) for domain in self.trained_domains},
            {domain.name: domain.weight for domain in self.trained_domains},
        )

    @property
    def groups_in_flight(self) -> int:
        """The number of groups in flight per actor; by default four times what fills the slots of all engines.

        A slot decodes one answer. Elastic engines count at their maximum number. Towards its end, a group occupies few
        slots, because only its longest answers are still being sampled: with twice what fills the slots, engines were
        78 % busy on heavy-tailed lengths. Depending on k, the controller may allow fewer groups.
        """
        if self.actor.groups_in_flight is not None:
            return self.actor.groups_in_flight
        limits = self.elastic.types.values()
        engines = max(self.engine.count, sum(each.max for each in limits))
        smallest = min(self.group_size_of(domain) for domain in self.trained_domains)
        return max(1, math.ceil(4 * engines * self.engine.slots / (smallest * self.actor.count)))

    def gpus_of_engine(self, type: str | None = None) -> int:
        """Return the number of GPUs per engine of the given type, or of the default type, on a machine with GPUs."""
        on_host = self.engine.device is Device.CPU or (type or self.engine.type) in registry.ENGINES.having("on_host")
        return 0 if on_host else self.engine.devices

    @property
    def optimizer_steps(self) -> int:
        """The run's planned number of optimizer steps, used by schedules; `target_kl` may end a step with fewer."""
        return self.run.steps * self.training.epochs * self.training.mini_batches

    @property
    def gpus_of_trainer(self) -> int:
        """The number of GPUs of the trainer on a machine with GPUs: its mesh's size, by default 1; 0 if on the CPU."""
        on_host = self.trainer.device is Device.CPU or self.trainer.type in registry.TRAINERS.having("on_host")
        return 0 if on_host else self.trainer_devices

    @property
    def trainer_processes(self) -> int:
        """The number of trainer processes that the launcher starts: the mesh's size, if its devices are processes.

        It is 1 if the recipe sets a rendezvous (`distributed`), because the user then starts the other processes.
        """
        is_started_whole = self._has_ranks and "distributed" not in self.trainer.options
        return self.trainer_devices if is_started_whole else 1

    @property
    def may_take_turns(self) -> bool:
        """True if engines and trainer can change their threads while the run is live, and the run chooses its lag."""
        engine, trainer = registry.ENGINES.get(self.engine.type), registry.TRAINERS.get(self.trainer.type)
        is_able = engine is not None and trainer is not None and engine.use_threads and trainer.use_threads
        return self.staleness.auto_j and self.trainer_processes == 1 and bool(is_able)

    def cpu_variables(self, part: Literal["engine", "trainer"], type: str) -> Mapping[str, str]:
        """Return the environment variables that keep a process of an engine or trainer off the GPUs that it sees."""
        component = (registry.ENGINES if part == "engine" else registry.TRAINERS).get(type)
        return {} if component is None else component.cpu_variables

    @property
    def _has_ranks(self) -> bool:
        mesh = registry.MESHES.get(self.trainer.type) if self.trainer_devices > 1 else None
        return mesh is not None and mesh.launched

    @property
    def trainer_devices(self) -> int:
        """The number of devices in the trainer's mesh, by default 1."""
        # The trainer validates the mesh later, so tolerate wrong types here.
        mesh = self.trainer.options.get("mesh", {})
        return math.prod(axis for axis in mesh.values() if isinstance(axis, int)) if isinstance(mesh, dict) else 1

    @property
    def in_one_process(self) -> Self:
        """The same recipe with a trainer of a single process; its steps are equal up to rounding."""
        if not self._has_ranks:
            return self
        options = {name: value for name, value in self.trainer.options.items() if name not in ("mesh", "distributed")}
        return self.changed("trainer", options=options)

    @property
    def servers_to_start(self) -> int:
        """The number of parameter servers to start; 0 if weights are broadcast, or the recipe names running servers."""
        wanted = self.weights.transport is Transport.PULL and not self.parameter_server.urls
        return self.parameter_server.shards * self.parameter_server.replicas if wanted else 0

    def changed(self, section: str, **values: Any) -> Self:
        """Return a copy with other values in one section; the values are not validated."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=values)})

    def group_size_of(self, domain: DomainSection) -> int:
        return domain.group_size or self.sampling.group_size

    def key_of_group_size(self, domain: DomainSection) -> str:
        return "sampling.group_size" if domain.group_size is None else f"domains.{domain.name}.group_size"

    def max_tokens_of(self, domain: DomainSection) -> int:
        return domain.max_tokens or self.sampling.max_tokens

    def evaluation_max_tokens_of(self, domain: DomainSection, asked: EvaluationSet) -> int:
        return asked.max_tokens or self.max_tokens_of(domain)


def load(recipe: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe file, or the shipped recipe of this name, and apply `section.key=value` overrides.

    Raises:
        RecipeError: the recipe is invalid; the message names the field's path, the expected and the given value.
    """
    return parse(resolved_beside(overridden(_read(_locate(str(recipe), beside=None)), overrides), working_directory()))


def load_run(run_dir: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load the resolved recipe of an existing run, with overrides; raise `UserError` if it is missing or damaged."""
    recipe = run_dir / "recipe.toml"
    if not recipe.is_file():
        raise UserError(f"{run_dir} holds no run: expected {recipe}; `pipelinerl run <recipe>` starts one")
    return load(recipe, overrides)


def parse(table: Mapping[str, Any]) -> RunConfig:
    """Validate a recipe whose base and overrides are merged; raise `RecipeError` with a line for each invalid field."""
    refuse_unwritable(table)
    refuse_absent_plugins(table)
    if "imitation" in table:
        raise RecipeError(
            "imitation: demonstrations are now a domain's loss; replace the section by [[domains]] tables with the "
            'source and prompts of the domains it named and loss = "ce", where `weight` is their share of the problems '
            "and `loss_weight` the factor of their loss"
        )
    try:  # validate as JSON: pydantic then accepts strings as enums and lists as tuples, but no strings as numbers
        return RunConfig.model_validate_json(json.dumps(table, default=str))
    except ValidationError as error:
        raise RecipeError(sentences(error, RunConfig, table)) from None


def _locate(recipe: str, *, beside: Path | None) -> Path:
    candidates = [Path(recipe), RECIPES / f"{recipe}.toml", RECIPES / recipe]
    if beside is not None:
        candidates.insert(0, beside.parent / recipe)
    located = next((path for path in candidates if path.is_file()), None)
    if located is None:
        shipped = sorted(path.stem for path in RECIPES.glob("*.toml"))
        if "=" in recipe:
            raise RecipeError(f"expected a recipe before the change {recipe}; for example: tiny {recipe}")
        raise RecipeError(
            f"recipe {recipe!r} is neither a file nor a shipped recipe; shipped are: {', '.join(shipped)}"
            f"{did_you_mean(recipe, shipped)}"
        )
    return located


def _read(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    # `above` holds the files whose `base` led to this one, to detect cycles.
    if path.resolve() in above:
        raise RecipeError(f"{path}: base refers back to this file; end the chain with a recipe that has no base")
    try:
        # The encoding utf-8-sig also accepts the byte order mark that Windows editors write.
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror}") from None
    table = resolved_beside(table, path.resolve().parent)
    base = table.pop("base", None)
    if base is None:
        return table
    if not isinstance(base, str):
        raise RecipeError(f"{path}: base must be the text of a path, or the name of a shipped recipe, got {base!r}")
    return merged(_read(_locate(base, beside=path), (*above, path.resolve())), table)


def to_table(config: RunConfig, *, without_defaults: bool = False) -> dict[str, Any]:
    """Return the resolved recipe as plain TOML values, without secrets; keys whose value is None are left out.

    `without_defaults` also leaves out keys with their default value, except the staleness bounds j and k.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items() if item is not None}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        if isinstance(value, SecretStr):
            return without_secrets(value.get_secret_value())
        return str(value) if isinstance(value, Path) else value

    table: dict[str, Any] = plain(config.model_dump(mode="python", exclude_defaults=without_defaults))
    bounds = config.staleness.bounds
    k = bounds.k if math.isinf(bounds.k) else int(bounds.k)
    kept = {name: value for name, value in table.get("staleness", {}).items() if name != "mode"}
    table["staleness"] = kept | {"j": AUTO if config.staleness.auto_j else bounds.j, "k": k}
    return table


def save(config: RunConfig, path: Path, *, notes: Sequence[str] = ()) -> None:
    """Write the resolved recipe, secrets included, readable only by its owner; `notes` become comments at its top."""
    table = to_table(config)
    if config.streams.redis_url is not None:
        table["streams"]["redis_url"] = config.streams.redis_url.get_secret_value()
    comments = "".join(f"# {' '.join(note.split())}\n" for note in notes)
    write_private(path, comments + tomli_w.dumps(table))


def write_layout(run_dir: Path) -> None:
    """Write the layout version (`messages.LAYOUT`) to the directory of a new run, next to its recipe."""
    (run_dir / "layout").write_text(f"{LAYOUT}\n")


def check_layout(run_dir: Path) -> None:
    """Raise `UserError` if the directory contains a run of another layout, begun by an incompatible version."""
    if not (run_dir / "recipe.toml").is_file():
        return
    try:
        found = (run_dir / "layout").read_text().strip()
    except FileNotFoundError:
        found = "1"
    if found != str(LAYOUT):
        raise UserError(layout_refusal(f"the run in {run_dir}", found))
