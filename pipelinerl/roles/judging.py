"""Makes the verifier `judge` of a domain by its section: connections, rubric, and the account of what it has taken."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

from pipelinerl.config.domains import DomainSection
from pipelinerl.config.judging import JudgeSection
from pipelinerl.engines.http.openai_client import OpenAIServer, models_at
from pipelinerl.errors import AddressError, RecipeError
from pipelinerl.verifiers.judge.judge import Judge, JudgeServer, JudgeSettings
from pipelinerl.verifiers.judge.scores import ScoreFormat
from pipelinerl.verifiers.judge.spending import Spending

_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 5.0


class JudgeBudget(NamedTuple):
    """Where a process keeps its account of what judging has taken, and how many processes share a run's budget."""

    folder: Path
    sharers: int


def open_judge(domain: DomainSection, *, purse: JudgeBudget | None) -> Judge:
    """The domain's judge, which nothing has been asked yet; without a purse it counts from 0 and has the whole budget.

    Raises:
        RecipeError: the domain does not say whom to ask, or the key is not there.
    """
    where, section = f"domains.{domain.name}", domain.judge
    if section is None:
        raise RecipeError(f'{where}.judge must say whom to ask: judge = {{ url = "http://host:port" }}')
    try:
        key = section.key
    except RecipeError as error:
        raise RecipeError(f"{where}.{error}") from None
    token = None if key is None else key.get_secret_value()
    sharers = 1 if purse is None else purse.sharers
    bounded = section.most_calls is not None or section.most_tokens is not None
    spending = Spending(
        where=where,
        most_calls=_share(section.most_calls, sharers),
        most_tokens=_share(section.most_tokens, sharers),
        file=purse.folder / f"{quote(domain.name, safe='')}.json" if purse is not None and bounded else None,
    )
    return Judge(_settings(section, domain.correct_at), open_server=lambda: _opened(section, token), spending=spending)


async def _opened(section: JudgeSection, token: str | None) -> JudgeServer:
    """The server; it is asked for its models if the recipe names none, again and again as long as a vote may take."""
    model, deadline, pause_s = section.model, time.monotonic() + section.timeout_s, _FIRST_PAUSE_S
    while model is None:
        try:
            model = (await models_at(section.url, token=token))[0]["id"]
        except AddressError:
            if time.monotonic() + pause_s >= deadline:
                raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return OpenAIServer(section.url, model=model, token=token, deadline_s=section.timeout_s)


def _settings(section: JudgeSection, correct_at: float) -> JudgeSettings:
    pattern = None if section.pattern is None else re.compile(section.pattern)
    return JudgeSettings(
        rubric=section.template,
        format=ScoreFormat(low=section.low, high=section.high, pattern=pattern),
        votes=section.votes,
        least_agreement=section.least_agreement,
        correct_at=correct_at,
        temperature=section.temperature,
        max_tokens=section.max_tokens,
        most_chars=section.most_chars,
        concurrency=section.concurrency,
        remembered=section.remembered,
    )


def _share(most: int | None, sharers: int) -> int | None:
    return None if most is None else max(1, most // sharers)
