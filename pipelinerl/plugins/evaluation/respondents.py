"""Respondents answer the problems of an evaluation: an engine built here for a model, or a server at a URL.

    async with respondent(target, config) as answering:
        samples = await answering.samples(order)

An engine started here is always closed. A target that cannot answer is reported in one sentence before any order is
sent. An engine of this project receives one request for all samples of a problem; any other server receives a request
per sample and returns only text.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from inference_contract.engine import Engine
from inference_contract.errors import ContractError
from inference_contract.schemas import ChatCompletion, ChatCompletionRequest
from pipelinerl import registry, rng
from pipelinerl.actor.group_maker import Sampler
from pipelinerl.actor.single_turn import chat_request
from pipelinerl.commands.remote import is_url
from pipelinerl.config.recipe import RunConfig, check_layout
from pipelinerl.config.sections import ModelSection
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.engines.http.openai_client import OpenAIServer, TextAnswer, models_at
from pipelinerl.engines.http.pool import EnginePool
from pipelinerl.errors import UserError
from pipelinerl.models.chat_template import check_chat_template
from pipelinerl.models.checkpoint import check_directory
from pipelinerl.roles.dtypes import plain_model, with_dtype
from pipelinerl.roles.engine_role import engine_outside_run
from pipelinerl.system.background import to_its_end
from pipelinerl.system.files import from_home
from pipelinerl.types import Answered, PromptOrder

#: Suffix that users often append to a server's base URL; it is removed.
_V1: Final = "/v1"


class Respondent(NamedTuple):
    """Source of the samples that a prompt order requests: an engine or a server.

    `samples` returns all samples of an order, or raises `ContractError` or `PipelineError`. `sampler` plays episodes,
    and is None if answers have no token ids, which episodes need.
    """

    samples: Callable[[PromptOrder], Awaitable[list[TextAnswer]]]
    sampler: Sampler | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The model to evaluate: a model directory with its version, or a server's URL. `name` is for display."""

    name: str
    url: str = ""
    model: Path | None = None
    version: int = 0
    recipe: Path | None = None
    """The run's own recipe, if the target is a run."""

    @property
    def fingerprint(self) -> str:
        """A digest of the files' names, sizes and times, to detect a rewritten model; empty for a URL."""
        if self.model is None:
            return ""
        files = sorted(path for path in self.model.iterdir() if path.is_file())
        stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        return hashlib.sha256(repr(stats).encode()).hexdigest()[:16]

    def named(self, model: str) -> str:
        """Return the target's name for an `AnswerLog`; `model` names one of a server's models, or is empty."""
        return f"{self.url or self.model} {model}".strip()


def target_of(text: str, *, checkpoint: str = "") -> Target:
    """Parse a URL, model directory, `shipped:<name>`, or run directory with its checkpoint. Raises `UserError`."""
    if is_url(text):
        if checkpoint:
            raise UserError(f"--checkpoint needs a run's directory, and {text} is not one; leave it out")
        return Target(name=text, url=text.rstrip("/").removesuffix(_V1))
    path = from_home(text)
    if (path / "recipe.toml").is_file():
        return _checkpoint_of(path, checkpoint)
    if checkpoint:
        raise UserError(f"--checkpoint needs a run's directory, and {text} is not one; leave it out")
    model = ModelSection(path=text).resolved
    if not model.is_dir():
        raise UserError(f"{text} is neither a run's directory, nor a model's, nor a URL that begins with http")
    check_directory(model)
    check_chat_template(model)
    return Target(name=text, model=model)


def _checkpoint_of(run_dir: Path, checkpoint: str) -> Target:
    check_layout(run_dir)
    checkpoints = sorted(path for path in (run_dir / "checkpoints").glob("step-*") if path.name[5:].isdecimal())
    number = checkpoint.removeprefix("step-")
    matching = [
        path for path in checkpoints if not checkpoint or (number.isdecimal() and int(path.name[5:]) == int(number))
    ]
    if not matching:
        known = ", ".join(path.name for path in checkpoints)
        raise UserError(f"{run_dir} has no checkpoint {checkpoint or 'yet'}" + (f"; it has {known}" if known else ""))
    path = matching[-1]
    return Target(
        name=f"{run_dir}, {path.name}", model=path, version=int(path.name[5:]), recipe=run_dir / "recipe.toml"
    )


def recipe_of(target: Target, recipe: str | None) -> str:
    """Return `recipe` if given, else the path of the target's own recipe; raise `UserError` if there is neither."""
    if recipe is None and target.recipe is None:
        raise UserError(f"--recipe is required, because {target.name} is not a run's directory")
    return recipe or str(target.recipe)


@asynccontextmanager
async def respondent(
    target: Target, config: RunConfig, *, token: str | None, model: str = ""
) -> AsyncIterator[Respondent]:
    """Yield a respondent for the target until the block ends; raise `UserError` if nothing can answer.

    The recipe's `engine` section describes the engine for a model directory. `token` and `model` (by default the
    server's first model) are for the server at a URL.
    """
    if target.model is not None:
        async with _made_here(_with_model(config, target.model)) as engine:
            here = _OfTheContract(engine.complete)
            yield Respondent(here.samples, here)
        return
    cards = await models_at(target.url, token=token)
    deadline_s = config.actor.timeout_s
    if "layout_id" in cards[0]:
        async with EngineClient(token=token) as client:
            there = _OfTheContract(EnginePool(client, [target.url], deadline_s=deadline_s).complete)
            yield Respondent(there.samples, there)
        return
    name = model or cards[0]["id"]
    async with OpenAIServer(target.url, model=name, token=token, deadline_s=deadline_s) as server:
        yield Respondent(partial(_texts, server))


def _with_model(config: RunConfig, model: Path) -> RunConfig:
    if config.engine.type in registry.ENGINES.having("drives_server"):
        raise UserError(
            f"engine.type {config.engine.type} is an external server, which cannot load {model}; "
            "name the server's URL instead of the model, or use --set engine.type=torch"
        )
    # A run serves a bfloat16 model on a CPU in float32; in bfloat16, greedy answers would differ.
    return with_dtype(config.changed("model", path=str(plain_model(model))))


@asynccontextmanager
async def _made_here(config: RunConfig) -> AsyncIterator[Engine]:
    engine = engine_outside_run(config)
    try:
        await engine.start()
        yield engine
    except ContractError as error:
        raise UserError(f"the engine for {config.model.resolved} has failed: {error}") from error
    finally:
        # Finish closing even if Ctrl-C has cancelled this task: the engine must end its processes and threads.
        await to_its_end(engine.close())


class _OfTheContract:
    """Samples of an engine of this project: one request returns all samples of a problem, as in an actor."""

    def __init__(self, complete: Callable[[ChatCompletionRequest], Awaitable[Answered | ChatCompletion]]) -> None:
        self._complete = complete

    async def complete(
        self,
        request: ChatCompletionRequest,
        *,
        begun: Callable[[], None],
        engine: str = "",
        near: str = "",
        on_text: Callable[[str], None] | None = None,
    ) -> Answered:
        answered = await self._complete(request)
        return answered if isinstance(answered, Answered) else Answered(answered, engine)

    async def samples(self, order: PromptOrder) -> list[TextAnswer]:
        answered = await self._complete(chat_request(order))
        completion = answered.completion if isinstance(answered, Answered) else answered
        return [
            TextAnswer(
                each.message.content, each.finish_reason, None if each.token_ids is None else len(each.token_ids)
            )
            for each in completion.choices
        ]


async def _texts(server: OpenAIServer, order: PromptOrder) -> list[TextAnswer]:
    """Return the samples of a server that returns only text; it receives one request per sample."""
    async with asyncio.TaskGroup() as group:
        requests = [
            group.create_task(server.sample(order.problem.messages, order.sampling, seed=rng.key(order.seed, sample)))
            for sample in range(order.sampling.num_samples)
        ]
    return [each.result() for each in requests]
