"""Groups of episodes: for each order, G conversations between the model and an environment.

    order ─▶ G × (episode host ⇄ gateway ⇄ engine) ─▶ verdicts ─▶ rollouts

If an environment raises, loses its host (the process that runs it) or times out, the rollout is masked instead of
rewarded with 0, because the failure says nothing about the model. An episode that reaches one of its own limits (turns,
tokens, context) is judged as it stands. If no engine can answer a turn, the order fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Final, Protocol

import msgspec

from inference_contract.schemas import ChatCompletion, ChatCompletionRequest, FinishReason
from pipelinerl import rng
from pipelinerl.actor.group_maker import GroupProgress, MadeRollout, Sampler
from pipelinerl.config.domains import EpisodeSection
from pipelinerl.errors import PipelineError
from pipelinerl.plugins.episodes.environment import Task
from pipelinerl.plugins.episodes.episode import Episode, NewSegment
from pipelinerl.plugins.episodes.gateway import Gateway, OnText, SampleTurn
from pipelinerl.plugins.episodes.host_pool import EpisodeEnd, HostLost
from pipelinerl.plugins.episodes.tool_loop import Toolbox
from pipelinerl.system.background import run_together
from pipelinerl.types import PromptOrder, Verdict
from pipelinerl.verifiers.verdicts import checked, judged, verdict_of
from pipelinerl.verifiers.verifier import GroupVerifier, Judgement, SampledAnswer, failed, graded, shown, timed_out

log = logging.getLogger("pipelinerl")

#: Reasons for splitting an episode into segments; they indicate a mistake if the agent meant to hold one conversation.
_COSTLY: Final = frozenset({NewSegment.HISTORY_DIFFERS, NewSegment.TOOLS_DIFFER, NewSegment.DOES_NOT_APPEND})
#: The actor warns if tools were offered in this many episodes and no call could be parsed in any of them.
_WITHOUT_CALLS: Final = 20
#: Maximum number of attempts at an episode whose host is lost.
_LIVES: Final = 2


class Player(Protocol):
    """Runner of one domain's episodes, such as `EpisodeHosts` or `OpenEnv`; episodes call the model via the gateway."""

    async def play(self, task: Task, *, base_url: str, api_key: str, timeout_s: float) -> EpisodeEnd:
        """Play one episode. Raises TimeoutError or `HostLost`."""
        ...

    async def start(self) -> None:
        """Start the processes that the first episode needs, before it is played."""
        ...

    async def close(self) -> None:
        """Stop everything that `start` and `play` have started."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeDomain:
    """A domain's player, limits and verifier; with None as verifier, the environment's rewards give the verdict.

    `places` limits the number of episodes at once. An episode's time starts when it has a place.
    """

    player: Player
    limits: EpisodeSection
    verifier: GroupVerifier | None
    correct_at: float
    tools: Toolbox | None = None
    places: asyncio.Semaphore | None = None

    async def start(self) -> None:
        await self.player.start()
        if self.tools is not None:
            await self.tools.start()

    async def close(self) -> None:
        await self.player.close()
        if self.tools is not None:
            await self.tools.close()


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """A finished episode and its judgement.

    `is_counted` says whether `VerifierTally` counts the judgement. If several episodes lose the host process that they
    share, only one is counted. Otherwise one lost host would look like an environment that always fails.
    """

    episode: Episode
    judgement: Judgement
    is_counted: bool = True


class Episodes:
    """`EpisodeMaker`; tries a turn up to `attempts` times if weight updates abort it."""

    def __init__(self, sampler: Sampler, domains: Mapping[str, EpisodeDomain], *, attempts: int) -> None:
        self._gateway = Gateway()
        self._sampler = sampler
        self.domains = domains
        self._attempts = attempts
        self._warned: set[tuple[str, str]] = set()
        self._without_calls: Counter[str] = Counter()
        """Episodes with offered tools, by domain, counted until the first call is parsed."""
        self._calls: set[str] = set()

    def serve(self) -> AbstractAsyncContextManager[None]:
        """Serve the model to agents until the block ends."""
        return self._gateway.serve()

    async def start(self) -> None:
        await asyncio.gather(*(domain.start() for domain in self.domains.values()))

    async def close(self) -> None:
        for domain in self.domains.values():
            await domain.close()

    async def make(self, order: PromptOrder, progress: GroupProgress) -> Sequence[MadeRollout]:
        """Play G episodes concurrently; return the rollouts of those in which the model answered at least once."""
        played = await run_together(self.play(order, sample, progress) for sample in range(order.sampling.num_samples))
        answered_episodes = [each for each in played if each.episode.last is not None]
        progress.judgements = [each.judgement for each in played if each.is_counted]
        progress.spans = [
            [(span.model_version, span.num_tokens) for turn in each.episode.turns for span in turn.turn.spans]
            for each in answered_episodes
        ]
        if not answered_episodes:
            reason = played[0].judgement.verdict.reason
            raise PipelineError(f"{order.order_id}: the model answered in no episode; the first: {reason}")
        temperature = order.sampling.temperature or 1.0
        return [
            MadeRollout(each.episode.rollout(each.judgement.verdict, temperature=temperature), each.episode.last.text)
            for each in answered_episodes
            if each.episode.last is not None
        ]

    async def play(self, order: PromptOrder, sample: int, progress: GroupProgress) -> PlayedEpisode:
        """Play one episode, and play it again if its host is lost; raise if no engine could answer one of its turns."""
        domain = self.domains[order.problem.domain]
        async with domain.places or contextlib.nullcontext():
            began, episode, lost = time.monotonic(), Episode(order, sample, domain.limits), HostLost("")
            for _ in range(_LIVES):
                try:
                    verdict = await self._verdict_of(order, episode, domain, progress)
                except HostLost as error:
                    episode, lost = Episode(order, sample, domain.limits), error
                else:
                    return PlayedEpisode(episode, Judgement(verdict, time.monotonic() - began))
            return PlayedEpisode(episode, Judgement(failed(str(lost)), time.monotonic() - began), lost.is_first)

    async def _verdict_of(
        self, order: PromptOrder, episode: Episode, domain: EpisodeDomain, progress: GroupProgress
    ) -> Verdict:
        began = time.monotonic()
        task = Task.of(order.problem, seed=rng.key(order.seed, "environment", episode.sample))
        async with self._gateway.open(episode, self._turn_of(order, episode, progress), domain.tools) as opened:
            try:
                ended = await domain.player.play(
                    task, base_url=opened.base_url(), api_key=episode.secret, timeout_s=domain.limits.timeout_s
                )
            except TimeoutError:
                ended = None
        if opened.failure is not None:
            raise opened.failure
        if opened.fault:
            return failed(opened.fault)
        self._warn(order.problem.domain, episode)
        progress.episodes.append((episode.calls, max(0.0, time.monotonic() - began - episode.sampling_s)))
        if episode.calls.offered:
            self._warn_without_calls(order.problem.domain, episode)
        if ended is None:
            late = f"the episode took longer than {domain.limits.timeout_s:g} s (episode.timeout_s)"
            return replace(timed_out(domain.limits.timeout_s), reason=late)
        return await _verdict(order, episode, ended, domain)

    def _warn(self, domain: str, episode: Episode) -> None:
        """Warn once of each habit of an agent that makes its episodes train worse than they could."""
        warnings = {
            name: f"{name} of its agent has no effect; the recipe decides on sampling" for name in episode.overridden
        }
        for reason in {turn.new_segment for turn in episode.turns} & _COSTLY:
            warnings[str(reason)] = (
                f"an episode needs several segments ({reason}), and the trainer computes what they share again where "
                "they do not fit into one micro-batch; docs/start/environments.md says when that happens"
            )
        if episode.abandoned:
            warnings["abandoned"] = (
                f"an episode repeated a request without continuing its answer, so {episode.abandoned} of its answers "
                "do not train; continue each answer, or sample independent answers from agents of different names"
            )
        for name, warning in warnings.items():
            if (domain, name) not in self._warned:
                self._warned.add((domain, name))
                log.warning("domain %s: %s", domain, warning)

    def _warn_without_calls(self, domain: str, episode: Episode) -> None:
        if episode.calls.parsed:
            self._calls.add(domain)
        if domain in self._calls:
            return
        self._without_calls[domain] += 1
        if self._without_calls[domain] == _WITHOUT_CALLS:
            log.warning(
                "domain %s: tools are offered, and none of the first %d episodes had a call that could be parsed "
                "(%d malformed in the last); see its answers in `pipelinerl samples`, and whether the model was "
                "trained to call tools",
                domain,
                _WITHOUT_CALLS,
                episode.calls.malformed,
            )

    def _turn_of(self, order: PromptOrder, episode: Episode, progress: GroupProgress) -> SampleTurn:
        near = ""

        async def sample(request: ChatCompletionRequest, on_text: OnText | None = None) -> ChatCompletion:
            began = time.monotonic()
            try:
                return await sampled(request, on_text)
            finally:
                episode.sampling_s += time.monotonic() - began

        async def sampled(request: ChatCompletionRequest, on_text: OnText | None) -> ChatCompletion:
            nonlocal near
            for attempt in range(self._attempts):
                again = request.model_copy(update={"seed": ((request.seed or 0) + attempt) % 2**63})
                answered = await self._sampler.complete(
                    again, begun=progress.begin, engine=order.engine, near=near, on_text=on_text
                )
                progress.hand_over(answered)
                near = answered.url
                if answered.completion.choices[0].finish_reason is not FinishReason.ABORT:
                    progress.end_sampling(answered.url)
                    return answered.completion
                progress.resampled += 1
            raise PipelineError(
                f"weight updates aborted a turn in each of {self._attempts} attempts; raise j, or use "
                "on_update = continue"
            )

        return sample


async def _verdict(order: PromptOrder, episode: Episode, ended: EpisodeEnd, domain: EpisodeDomain) -> Verdict:
    if ended.how == "raised" and episode.was_refused:
        # A program or another client of OpenAI's API usually fails when its request is refused at a limit.
        ended = EpisodeEnd(how="over", reason=episode.over)
    if ended.how in ("raised", "cancelled"):
        return failed(f"the environment failed: {ended.reason}")
    if episode.last is None:
        # Such episodes train nothing. Counted as failures, whatever they return, they end a run that has no others.
        return failed(
            ended.reason or "the environment never asked the model for an answer that trains; call client.chat"
        )
    if ended.other:
        return failed(ended.other)
    of_turns = sum(turn.reward for turn in episode.turns)
    if ended.verdict is not None:
        verdict = checked(msgspec.convert(ended.verdict, Verdict), place="the environment")
        return _with_more(verdict, of_turns, domain)
    if ended.value is not None:
        return verdict_of(ended.value + of_turns, correct_at=domain.correct_at, place="the environment")
    if domain.verifier is not None:
        last = episode.last
        answer = SampledAnswer(last.text, last.turn.token_ids.tolist(), last.finish_reason)
        (judgement,) = await judged(domain.verifier, order.problem, [answer])
        return _with_more(judgement.verdict, of_turns, domain)
    if ended.how == "over" or of_turns:
        return replace(verdict_of(of_turns, correct_at=domain.correct_at), reason=shown(ended.reason))
    return failed("the environment returned None, rewarded no turn, and its domain names no verifier")


def _with_more(verdict: Verdict, of_turns: float, domain: EpisodeDomain) -> Verdict:
    if not of_turns or not verdict.outcome.is_judgement:
        return verdict
    reward = verdict.reward + of_turns
    return replace(verdict, reward=reward, outcome=graded(reward, domain.correct_at))
