"""Trials of a domain for `pipelinerl check`: play an episode with a scripted model, and call the domain's verifier.

The scripted model first answers with nothing, or with a call of the `python` tool, and then with the reference answer.
The output shows the exact tokens that the model would see, turn by turn. The verifier judges the reference answer and
an empty answer; a verifier that may cost money, such as an LLM judge, judges the reference answer only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from inference_contract.schemas import (
    AssistantMessage,
    ChatCompletion,
    ChatCompletionRequest,
    Choice,
    FinishReason,
    Usage,
)
from pipelinerl import registry
from pipelinerl.actor.episodes import Episodes, PlayedEpisode
from pipelinerl.actor.group_maker import GroupProgress
from pipelinerl.answers.tool_calls import ParsedAnswer
from pipelinerl.component import imported
from pipelinerl.config.domains import DomainSection
from pipelinerl.config.recipe import RunConfig
from pipelinerl.data.mixture import Mixture
from pipelinerl.environments.gateway import Gateway
from pipelinerl.errors import RecipeError, UnshownFieldError
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.roles.episodes import open_episodes
from pipelinerl.roles.verification import open_verifier
from pipelinerl.types import Answered, Outcome, Problem, PromptOrder, Purpose, Sampling
from pipelinerl.verifiers.group_filter import GroupFilter
from pipelinerl.verifiers.user_code import RewardFunction, parameters_of
from pipelinerl.verifiers.verdicts import judged
from pipelinerl.verifiers.verifier import GroupVerifier, Judgement, SampledAnswer, correct, wrong


async def episode_tried(
    config: RunConfig, domain: DomainSection, problem: Problem, tokenizer: ChatTokenizer
) -> list[tuple[str, str]]:
    """Play an episode; return pairs (kind of finding, line): its turns, its verdict, a warning if it may get too long.

    Raises:
        RecipeError: the environment fails (the message has the file and the line), or it offers tools whose calls the
            chat template cannot render.
    """
    first = _first_call(domain, tokenizer) if domain.episode.tools else ""
    answerer = ScriptedAnswers(tokenizer, [first, *[_reference(domain, problem)] * 1000])
    verifiers = {domain.name: open_verifier(domain)} if domain.has_verifier else {}
    alone = config.model_copy(update={"domains": (domain,)})
    domains, gateway = open_episodes(alone, verifiers), Gateway()
    episodes = Episodes(gateway, answerer, domains, attempts=1)
    order = PromptOrder(
        order_id="check",
        index=0,
        purpose=Purpose.EVALUATION,
        problem=problem,
        sampling=Sampling(num_samples=1, max_tokens=domain.max_tokens or config.sampling.max_tokens),
        seed=config.run.seed,
        chat_template_kwargs=domain.chat_template_kwargs,
    )
    try:
        async with gateway.serve():
            await domains[domain.name].start()
            played = await episodes.play(order, 0, GroupProgress())
    finally:
        for each in domains.values():
            await each.close()
    verdict = played.judgement.verdict
    if not verdict.outcome.is_judgement:
        raise RecipeError(f"domains.{domain.name}: a trial episode failed: {verdict.reason}")
    lines = [
        ("episode", f"domains.{domain.name}: {line}")
        for line in (*_turns(played, tokenizer), _verdict(played, answerer.seconds))
    ]
    return [*lines, *(("warning", line) for line in _too_long(config, domain, played, answerer.longest))]


def tool_format(tokenizer: ChatTokenizer) -> str:
    """Describe the format in which the chat template writes tool calls."""
    if tokenizer.call_style is None:
        return "writes no tool calls that can be parsed back, so requests with tools are rejected"
    return f"writes tool calls in the format of {tokenizer.call_style.form.name}, which is parsed"


def _first_call(domain: DomainSection, tokenizer: ChatTokenizer) -> str:
    try:
        return tokenizer.written_call("python", {"code": "print(6 * 7)"})
    except UnshownFieldError as error:
        raise RecipeError(f"domains.{domain.name}.episode.{error}") from error


def _turns(played: PlayedEpisode, tokenizer: ChatTokenizer) -> Iterator[str]:
    rollout = played.episode.rollout(played.judgement.verdict, temperature=1.0)
    for number, turn in enumerate(rollout.turns, 1):
        context, sampled = turn.context_token_ids, turn.token_ids
        begins = f", a new segment ({turn.begins})" if turn.begins and number > 1 else ""
        yield (
            f"turn {number}{begins}: {len(context)} tokens of context, {len(sampled)} that train: "
            f"{tokenizer.decode(context.tolist())!r} ▸ {tokenizer.decode(sampled.tolist())!r}"
        )


def _too_long(config: RunConfig, domain: DomainSection, played: PlayedEpisode, most_sent: int) -> Iterator[str]:
    if most_sent >= config.engine.context_length:
        yield (
            f"domains.{domain.name}: a request of this episode has {most_sent:,} tokens, and a run refuses it, because "
            f"engine.context_length is {config.engine.context_length:,}; raise it, or shorten the messages"
        )
        return
    turns, most = [each.turn for each in played.episode.turns], domain.episode.max_turns
    answer = domain.episode.turn_tokens or domain.max_tokens or config.sampling.max_tokens
    later = [len(turn.context_token_ids) for turn in turns[1:]]
    longest = len(turns[0].context_token_ids) + most * answer + (most - 1) * max(later, default=0)
    if later and longest > config.engine.context_length:
        yield (
            f"domains.{domain.name}: an episode of {most} such turns with answers of {answer} tokens may reach "
            f"{longest:,} tokens and ends at {config.engine.context_length:,}; raise engine.context_length, or lower "
            "episode.max_turns or episode.turn_tokens"
        )


def _verdict(played: PlayedEpisode, answering_s: float) -> str:
    verdict, seconds = played.judgement
    own_s = max(0.0, seconds - answering_s)
    reason = f" ({verdict.reason})" if verdict.reason else ""
    return f"{verdict.outcome}, reward {verdict.reward:g}{reason}; {own_s:.2f} s in the environment"


class ScriptedAnswers:
    """`Sampler` that returns the given answers in order.

    `seconds` is the total time that its calls have taken, and `longest` the number of tokens of the longest request.
    """

    def __init__(self, tokenizer: ChatTokenizer, texts: Iterable[str]) -> None:
        self.seconds, self.longest = 0.0, 0
        self._tokenizer = tokenizer
        self._texts = iter(texts)

    async def complete(
        self,
        request: ChatCompletionRequest,
        *,
        begun: Callable[[], None],
        engine: str = "",
        near: str = "",
        on_text: Callable[[str], None] | None = None,
    ) -> Answered:
        """Return the next scripted answer."""
        began = time.monotonic()
        messages, tools = request.messages or [], request.tools or ()
        kwargs, known = request.chat_template_kwargs, request.continue_token_ids
        if known and request.continue_from:
            prompt = self._tokenizer.encode_continuation(messages, request.continue_from, known, kwargs, tools)
        else:
            prompt = self._tokenizer.encode_chat(messages, kwargs, tools)
        self.longest = max(self.longest, len(prompt))
        text = next(self._texts)
        sampled = [*self._tokenizer.encode(text), min(self._tokenizer.eos_token_ids)]
        answer = ParsedAnswer(text)
        if tools:
            answer = self._tokenizer.parse_answer(text, tools, prompt_token_ids=prompt, key=b"check")
        choice = Choice(
            index=0,
            message=AssistantMessage(content=answer.content, tool_calls=list(answer.calls) or None),
            finish_reason=FinishReason.TOOL_CALLS if answer.calls else FinishReason.STOP,
            token_ids=sampled,
            token_logprobs=[0.0] * len(sampled),
            version_spans=[(0, len(sampled))],
        )
        usage = Usage(
            prompt_tokens=len(prompt), completion_tokens=len(sampled), total_tokens=len(prompt) + len(sampled)
        )
        self.seconds += time.monotonic() - began
        return Answered(
            ChatCompletion(
                id="check",
                created=0,
                model="check",
                choices=[choice],
                usage=usage,
                prompt_token_ids=prompt,
                model_version=0,
            ),
            url="",
        )


#: A registered verifier is refused if it rejects the reference answers of this many problems.
_TRIED: Final = 16
_LEFT_OUT: Final = (
    "answers without a verdict are left out of the reward, which then looks better than it is; a reward function must "
    "return 0.0 for a wrong answer, not None"
)


async def verifier_tried(domain: DomainSection, problems: Mixture) -> list[tuple[str, str]]:
    """Return findings: the verdicts on the reference answer and on an empty answer, and warnings of missing verdicts.

    A function of the user's is also called on a wrong answer, the reference answer of another problem.

    Raises:
        RecipeError: neither answer can be judged, or verifiers that compare answers with the reference accept none of
            the first `_TRIED` reference answers.
    """
    where = f"domains.{domain.name}"
    if (cheaper := _cheaper(domain)) is not None:
        return [("verifier", await _tried_once(cheaper, problems, where=where))]
    verifier, unjudged = open_verifier(domain), list[tuple[str, str]]()
    try:
        truth, empty = [
            await _judged(verifier, problems.problem(0), text) for text in (_reference(domain, problems.problem(0)), "")
        ]
        if not (truth.verdict.outcome.is_judgement or empty.verdict.outcome.is_judgement):
            raise RecipeError(f"{where}.verifier cannot judge its problems: {truth.verdict.reason}")
        names = {name for _, name in domain.verifiers}
        if names <= {*registry.VERIFIERS.having("needs_reference")}:
            await _find_one_right(verifier, domain, problems, truth, where=where)
        tried = {"the reference answer": truth, "an empty answer": empty}
        is_user_code = any(registry.is_user_code(registry.VERIFIERS, name) for name in names)
        if is_user_code and (other := _other_answer(problems)) is not None:
            tried["a wrong answer"] = await _judged(verifier, problems.problem(0), other)
        for what, judgement in tried.items():
            if not judgement.verdict.outcome.is_judgement:
                sentence = f"{where}: {what} got no verdict ({judgement.verdict.reason})"
                unjudged.append(("warning", f"{sentence}; {_LEFT_OUT}"))
    finally:
        await verifier.close()
    verdicts = f"of the reference answer {_summary(truth)}; of an empty answer {_summary(empty)}"
    return [("verifier", f"{where}: {verdicts}"), *unjudged]


def _other_answer(problems: Mixture) -> str | None:
    """Return a reference answer that differs from the first problem's; None if the first problems have no other."""
    first = problems.problem(0).ground_truth
    others = (problems.problem(index).ground_truth for index in range(1, _TRIED))
    return next((each for each in others if each and each != first), None)


def called_by_place(domain: DomainSection) -> Iterator[str]:
    """Yield a warning for each reward function whose first two parameters have unusual names.

    Parameters with unusual names are filled by position: the first with the problem, the second with the answer's text.
    The author of a function with the parameters `(response, label)` probably meant the answer and the ground truth.
    """
    for where, name in domain.verifiers:
        thing = imported(name) if registry.is_user_code(registry.VERIFIERS, name) else None
        if thing is not None and not hasattr(thing, "verify"):
            reward = RewardFunction.of_callable(thing)
            named = [parameter.name for parameter in parameters_of(thing)[: len(reward.by_place)]]
            if named and not (named[0] == "problem" and named[1].startswith("completion")):
                yield (
                    f"{where}: {named[0]} receives the problem and {named[1]} the text of the answer, by position; to "
                    "receive other values, use the names in docs/start/rewards.md: completion, answer, …"
                )


def _cheaper(domain: DomainSection) -> DomainSection | None:
    """Return the domain with the options of a trial; None if none of its verifiers costs money."""
    changed: dict[str, Any] = {}
    for name, component, options in domain.registered_verifiers:
        if component.trial is not None:
            changed[component.key or name] = options.model_copy(update=component.trial)
    return domain.model_copy(update=changed) if changed else None


async def _tried_once(domain: DomainSection, problems: Mixture, *, where: str) -> str:
    verifier = open_verifier(domain)
    try:
        judgement = await _judged(verifier, problems.problem(0), problems.problem(0).ground_truth)
    finally:
        await verifier.close()
    if not judgement.verdict.outcome.is_judgement:
        raise RecipeError(f"{where}.verifier cannot judge: {judgement.verdict.reason}")
    return f"{where}: of the reference answer alone, because answers cost money, {_summary(judgement)}"


async def filter_tried(judge: GroupFilter, problem: Problem, *, samples: int) -> str:
    """Describe the filter's decision on an invented, half correct group; raise `RecipeError` if the filter fails."""
    right = SampledAnswer(problem.ground_truth, range(1, len(problem.ground_truth) + 1))
    answers = [right if place < (samples + 1) // 2 else SampledAnswer("", (1,), "length") for place in range(samples)]
    verdicts = [correct(answer.text) if answer.text else wrong("no answer") for answer in answers]
    try:
        verdict, seconds = await judge.judge(problem, answers, verdicts)
    finally:
        await judge.close()
    if not verdict.outcome.is_judgement:
        raise RecipeError(f"curation.filter cannot judge a group: {verdict.reason}")
    decision = f"filters it: {verdict.reason}" if verdict.outcome is Outcome.WRONG else "keeps it"
    half = f"{sum(each.outcome is Outcome.CORRECT for each in verdicts)} of {samples} right"
    return f"curation.filter, of a made-up group of {problem.domain}, {half}: {decision}, in {seconds:.3f} s"


async def _find_one_right(
    verifier: GroupVerifier, domain: DomainSection, problems: Mixture, first: Judgement, *, where: str
) -> None:
    """Raise `RecipeError` if none of the first `_TRIED` reference answers is correct; `first` judges the first one."""
    if first.verdict.outcome is Outcome.CORRECT:
        return
    for problem in map(problems.problem, range(1, _TRIED)):
        reached = await _judged(verifier, problem, _reference(domain, problem))
        if reached.verdict.outcome is Outcome.CORRECT:
            return
    problem = problems.problem(0)
    raise RecipeError(
        f"{where}.verifier finds the reference answers of {_TRIED} problems wrong, such as {problem.ground_truth!r} to "
        f"{problem.messages[-1].content!r}; choose the verifier that belongs to the source"
    )


def _reference(domain: DomainSection, problem: Problem) -> str:
    """Return a right answer as a model would write it."""
    names = [name for _, name in domain.verifiers]
    verifier = registry.VERIFIERS.get(names[0]) if len(names) == 1 else None
    if verifier is not None and verifier.reference_answer:
        answer: str = imported(verifier.reference_answer)(problem)
        return answer
    return problem.ground_truth


async def _judged(verifier: GroupVerifier, problem: Problem, text: str) -> Judgement:
    (judgement,) = await judged(verifier, problem, [SampledAnswer(text)])
    return judgement


def _summary(judgement: Judgement) -> str:
    verdict, seconds = judgement
    reward = f", reward {verdict.reward:g}" if verdict.outcome.is_judgement else ""
    parts = f" ({', '.join(f'{part.name} {part.reward:g}' for part in verdict.parts)})" if verdict.parts else ""
    reason = f": {verdict.reason}" if verdict.reason else ""
    return f"{verdict.outcome}{reward}{parts} in {seconds:.3f} s{reason}"
