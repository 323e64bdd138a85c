"""`DomainSection`: a `[[domains]]` table of a recipe, with its problems, prompts, verifier and sampling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError, create_model, field_validator, model_validator

from inference_contract.weights import BaseUrl
from pipelinerl import registry
from pipelinerl.component import Component, VerifierComponent
from pipelinerl.config.learning import CooldownSection, RewardSection
from pipelinerl.data.prompts import Prompts, Template
from pipelinerl.enums import COLDEST, HOTTEST, History
from pipelinerl.errors import RecipeError
from pipelinerl.objective.reward import RewardShaping
from pipelinerl.objective.streams import Loss
from pipelinerl.section import Section
from pipelinerl.system.references import is_reference
from pipelinerl.types import DomainSampling, Message

#: The verifier of a domain that names no verifier.
DEFAULT_VERIFIER: Final = "math_answer"


class FewShotSection(Section):
    """One message of an example conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    """Author of the message."""
    content: str
    """Text of the message."""


class EpisodeSection(Section):
    """Limits of one episode in a domain with an environment."""

    max_turns: int = Field(default=20, ge=1, le=10_000)
    """The most model answers per episode, including those of sub-agents."""
    timeout_s: float = Field(default=600.0, gt=0, le=86_400)
    """Time limit of one episode; an episode that exceeds it is masked."""
    turn_tokens: int | None = Field(default=None, ge=1)
    """The most tokens of one answer; by default the domain's `max_tokens`."""
    history: History = History.EXACT
    """The construction of the next prompt: from sampled tokens (`exact`), or by the chat template (`template`)."""
    concurrent: int | None = Field(default=None, ge=1, le=10_000)
    """The most episodes at once per actor; by default four per core for a `command`, otherwise unlimited."""
    tools: tuple[str, ...] = ()
    """Tools that the model may call in each answer; `python` runs code in the sandbox of `[domains.oubliette]`."""

    @field_validator("tools")
    @classmethod
    def _are_registered(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if not set(names) <= set(registry.TOOLS):
            raise ValueError(f"must be among {', '.join(registry.TOOLS)}")
        return names


class RewardPartSection(Section):
    """One term of a domain's reward: a user's function, or a registered verifier."""

    function: str
    """A user's function (`path.py:name`), or the name of a registered verifier."""
    weight: float = 1.0
    """Factor of this term; must not be 0."""
    name: str = ""
    """Name of this term in figures; by default the name of the function."""

    @property
    def shown_as(self) -> str:
        return self.name or (self.function.rpartition(":")[2] if is_reference(self.function) else self.function)


class DomainSection(Section):
    """A kind of problem: its source, prompt format, verifier, and share of the training problems."""

    name: str
    """Unique name of the domain, as it appears in figures and knobs."""
    source: str
    """Name of a registered problem source, such as `files`, or a user's source as path.py:name; docs/start/data.md."""
    weight: float = Field(default=1.0, ge=0)
    """Relative share of the training problems; a domain with weight 0 is only available to evaluation sets."""
    loss: Loss = Loss.RL
    """Loss of the domain's tokens; docs/understand/objectives.md.

    `rl` is the objective, `ce` the cross-entropy of right answers from the data, `ref_kl` the KL to the reference.
    """
    teacher: str | None = None
    """Teacher of `loss = "ref_kl"`: a model directory, or the URL of an engine; by default the reference."""
    loss_weight: float = Field(default=1.0, gt=0)
    """Factor of the domain's loss; each loss has its own denominator."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the source; each source documents its own."""

    # The next keys set how answers are judged; see docs/start/rewards.md.
    verifier: str | None = None
    """Verifier of the answers; by default `math_answer`, unless `rewards` are given."""
    rewards: tuple[RewardPartSection, ...] = ()
    """Functions and verifiers whose weighted sum is the reward."""
    correct_at: float = 1.0
    """The lowest reward with which an answer counts as correct, if rewards are numbers or weighted sums."""
    verifier_timeout_s: float = Field(default=10.0, gt=0, le=3600)
    """Time limit for judging one answer."""
    verifier_workers: int | None = Field(default=None, ge=1, le=1024)
    """Verifier processes per actor; by default one for each of its cores, and at least two."""
    reward: RewardSection | None = None
    """Reward shaping; by default rewards are used unchanged."""
    cooldown: CooldownSection | None = None
    """Cooldown of solved problems; overrides the one in [curation]."""

    # The next keys set how multi-turn episodes are played; see docs/start/environments.md.
    environment: str | None = None
    """An async function of (task, client), or a class with reset, step and close, as path.py:name; or
    openenv:http://host:port, a server; or verifiers:id, a taskset.
    """
    environment_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment; for `openenv:` and `verifiers:` see docs/start/environments.md."""
    command: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """A program that plays episodes through OPENAI_BASE_URL or ANTHROPIC_BASE_URL.

    `{task}` in an argument is the last user message, and `{task_file}` the path of a file with it.
    """
    episode: EpisodeSection = EpisodeSection()
    """Limits of episodes; only for domains with an environment or a command."""

    # The next keys set how prompts are built; see docs/start/data.md.
    system_prompt: str = ""
    """System message of each conversation; empty for none."""
    prompt_template: Annotated[str, Field(min_length=1)] | None = None
    """The last user message, as a Jinja template or with plain `{field}`, over the fields of the problem's row."""
    few_shot: tuple[FewShotSection, ...] = ()
    """Example messages before each problem; a recipe may give the path of a JSON file instead."""
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Further arguments for the model's chat template, such as Qwen3's enable_thinking."""

    # The next keys override keys of [sampling] for this domain.
    group_size: int | None = Field(default=None, ge=1)
    """Answers per training problem; docs/start/data.md explains the size of a step if domains differ."""
    temperature: float | None = Field(default=None, ge=COLDEST, le=HOTTEST)
    """Training temperature of this domain. The knob `temperature` only affects domains without their own."""
    max_tokens: int | None = Field(default=None, ge=1)
    """The most tokens of one answer; by default `sampling.max_tokens`."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] | None = None
    """Strings that end an answer; by default `sampling.stop`."""

    @field_validator("prompt_template")
    @classmethod
    def _is_template(cls, text: str | None) -> str | None:
        try:
            _ = text and Template(text)
        except RecipeError as error:
            raise ValueError(str(error)) from None
        return text

    @model_validator(mode="after")
    def _examples_are_answered(self) -> Self:
        if self.few_shot and self.few_shot[-1].role != "assistant":
            raise ValueError(f"few_shot must end with the assistant's answer, got {self.few_shot[-1].role!r} last")
        if self.system_prompt and any(shot.role == "system" for shot in self.few_shot):
            raise ValueError(
                "few_shot must not hold a system message together with system_prompt; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _judged_in_one_way(self) -> Self:
        if self.verifier is not None and self.rewards:
            raise ValueError("verifier and rewards exclude each other; name the verifier as one of rewards")
        names = [part.shown_as for part in self.rewards]
        if len(set(names)) != len(names):
            raise ValueError(f"rewards must have unique names, got {', '.join(names)}; give each a name")
        if unweighted := [part.shown_as for part in self.rewards if part.weight == 0]:
            raise ValueError(f"rewards.weight must not be 0, as it is for {', '.join(unweighted)}; leave it out")
        return self

    @model_validator(mode="after")
    def _uses_its_options(self) -> Self:
        named = {f"the verifier {name}" for _, name in self.verifiers}
        named |= {f"the tool {name}" for name in self.episode.tools}
        for key, users in _USERS.items():
            if getattr(self, key) != type(self).model_fields[key].default and named.isdisjoint(users):
                raise ValueError(
                    f"{key} configures {' or '.join(users)}, which this domain does not use; leave {key} out"
                )
        return self

    @model_validator(mode="after")
    def _played_in_one_way(self) -> Self:
        if self.environment is not None and not self.is_hosted and not is_reference(self.environment):
            raise ValueError(
                f"environment must be path.py:name, package.module:name, or begin with one of "
                f"{', '.join(f'{name}:' for name in registry.ENVIRONMENTS)}, got {self.environment!r}"
            )
        if self.environment_options and self.environment is None:
            raise ValueError("environment_options are arguments of an environment, and this domain has none; set one")
        if self.environment is not None and self.command:
            raise ValueError("environment and command exclude each other; leave one of them out")
        if self.command and not self.names_verifier:
            raise ValueError("command needs verifier or rewards, which judge the last answer of the program's model")
        if self.episode != EpisodeSection() and not self.has_environment:
            raise ValueError(
                "episode configures an environment, a command or tools, and this domain has none; set one of them"
            )
        return self

    @model_validator(mode="after")
    def _suits_its_loss(self) -> Self:
        if self.loss is Loss.CE and self.has_environment:
            raise ValueError(
                'loss "ce" trains right answers that the data give, and episodes have none; take "rl" or "ref_kl"'
            )
        if self.teacher is not None and self.loss is not Loss.REF_KL:
            raise ValueError(f'teacher is for loss "ref_kl", and this domain has "{self.loss}"; leave it out')
        if self.teacher is not None and "://" in self.teacher:
            try:
                TypeAdapter(BaseUrl).validate_python(self.teacher)
            except ValueError:
                raise ValueError(
                    f"teacher must be a model directory or an engine's http://host:port, got {self.teacher!r}"
                ) from None
        return self

    @property
    def is_sampled(self) -> bool:
        """True if answers to the domain's problems are sampled for training."""
        return self.weight > 0 and self.loss is not Loss.CE

    @property
    def is_hosted(self) -> bool:
        """True if the environment is a registered one, such as an OpenEnv server, and not user code."""
        return self.environment is not None and self.environment.partition(":")[0] in registry.ENVIRONMENTS

    @property
    def has_environment(self) -> bool:
        """True if the domain's rollouts are episodes: with an environment, a user's program (`command`) or tools."""
        return self.environment is not None or bool(self.command) or bool(self.episode.tools)

    @property
    def verifiers(self) -> tuple[tuple[str, str], ...]:
        if not self.has_verifier:
            return ()
        if not self.rewards:
            return ((f"domains.{self.name}.verifier", self.verifier or DEFAULT_VERIFIER),)
        return tuple(
            (f"domains.{self.name}.rewards.{number}.function", part.function)
            for number, part in enumerate(self.rewards)
        )

    @property
    def registered_verifiers(self) -> Iterator[tuple[str, VerifierComponent, Any]]:
        """The name, component and options of each verifier that is no user code; raises like `options_of`."""
        for _, name in self.verifiers:
            if name in registry.VERIFIERS:
                component = registry.VERIFIERS[name]
                yield name, component, self.options_of(name, component)

    def options_of(self, name: str, component: Component) -> Any:
        """Return the section for the component `name`, None without options. Raises `RecipeError` if it needs some."""
        if component.section is None:
            return None
        key, section = component.key or name, component.section
        options = getattr(self, key, None)
        if options is not None and not isinstance(options, section):
            raise RecipeError(f"{name} has its options at {key}, which is a key of another part; rename its key")
        if options is None:
            required = ", ".join(f"{field} = …" for field, info in section.model_fields.items() if info.is_required())
            raise RecipeError(f"domains.{self.name}.{key} must be given for {name}: {key} = {{ {required} }}")
        return options

    @property
    def names_verifier(self) -> bool:
        """True if the recipe names a verifier or rewards for this domain."""
        return self.verifier is not None or bool(self.rewards)

    @property
    def has_verifier(self) -> bool:
        """True if a verifier judges the domain's answers.

        A domain that names no verifier has one by default, unless its environment judges the answers, or it trains only
        on right answers from the data (loss `ce`).
        """
        return self.names_verifier or (self.environment is None and self.loss is not Loss.CE)

    @property
    def shaping(self) -> RewardShaping | None:
        """The shaping of this domain's rewards; None if training uses them unchanged."""
        if self.reward is None and not self.rewards:
            return None
        part_weights = tuple((part.shown_as, part.weight) for part in self.rewards)
        return replace(self.reward.shaping if self.reward else RewardShaping(), part_weights=part_weights)

    @property
    def prompts(self) -> Prompts:
        return Prompts(
            system=self.system_prompt,
            few_shot=tuple(Message(shot.role, shot.content) for shot in self.few_shot),
            template=None if self.prompt_template is None else Template(self.prompt_template),
        )

    @property
    def sampling(self) -> DomainSampling:
        """The sampling parameters that the domain sets in place of the run's."""
        return DomainSampling(
            group_size=self.group_size,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            stop=self.stop,
            chat_template_kwargs=self.chat_template_kwargs,
        )


#: The verifiers and tools that have their options at each key of a domain.
_USERS: dict[str, list[str]] = {}


def _option_fields() -> Iterator[tuple[str, Any]]:
    """Yield a field for each section of a registered verifier or tool; a key that is taken is left as it is."""
    kinds: tuple[registry.Components[Any], ...] = (registry.VERIFIERS, registry.TOOLS)
    for kind, (name, component) in ((each, pair) for each in kinds for pair in each.loadable()):
        key, section = component.key or name, component.section
        if section is None or key in DomainSection.model_fields:
            continue
        if key not in _USERS:
            try:
                yield key, (section, section())
            except ValidationError:  # some options have no default
                yield key, (section | None, None)
        _USERS.setdefault(key, []).append(f"the {kind.kind} {name}")


# Type checkers see the class above, which has no fields for options: `options_of` returns them.
DomainSection = create_model(  # type: ignore[misc]
    "DomainSection", __base__=DomainSection, __module__=__name__, **dict(_option_fields())
)
