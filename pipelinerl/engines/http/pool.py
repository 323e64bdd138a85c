"""`EnginePool`: one chat completion from whichever engine has least to do, surviving engines that come and go.

Promises: a request is tried until it is answered or its deadline passes, on another engine if there is one, with the
same seed, so an answer does not depend on how often it was tried. What an engine has sampled when it fails, or is taken
out, is kept as far as it has come, and another engine goes on with it (`partial_answer.py`): answers come in parts, so
that they are here when an engine dies without a word. Engines that know nothing of that are asked for whole answers,
from the beginning each time; so is one that refuses to go on, or whose weights are of another epoch. An engine that
refuses the request itself is not asked for it again, and others are, since engines of one run may differ; once all that
serve have refused it, that is raised. A fault that the engine has no name for (`internal_error`) is a refusal once it
has come `_FAULTS` times: what an engine meets on its way out says nothing of the request. All samples of a request are
one engine's, which computes their prompt once. What runs at an engine that is no longer part of the run is handed over:
cancelled there and tried elsewhere. An engine that let a request's deadline pass is suspect, as one that failed.

| waits for | unblocked by | or, at the latest |
|---|---|---|
| an engine that is not suspect | its suspicion ends, or `update` | the pool's deadline |
| the completion | the engine, or `update` without it | the pool's deadline, after which the engine is suspect |
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Final, Protocol, final

from inference_contract.errors import ContractError, DeadlineExceeded, Dirty, EngineStopped, Overloaded
from inference_contract.schemas import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    Continuation,
    Health,
)
from pipelinerl.engines.http.least_busy import LeastBusy
from pipelinerl.engines.http.partial_answer import PartialAnswer
from pipelinerl.errors import DeadlineError, EngineUnreachable
from pipelinerl.types import Answered

#: Refusals that say something about the engine's state, not about the request.
_ELSEWHERE: Final = (Overloaded, Dirty, EngineStopped, DeadlineExceeded, EngineUnreachable)
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 2.0
_DEFAULT_TOKENS: Final = 256
_FAULTS: Final = 3
#: Tokens that the engine of an earlier turn may have to do beyond the least busy one, and be asked nevertheless.
NEAR_TOKENS: Final = 8192


class ChatClient(Protocol):
    """What the pool needs of `EngineClient`."""

    async def chat(self, url: str, request: ChatCompletionRequest) -> ChatCompletion:
        """One whole completion."""
        ...

    def stream(self, url: str, request: ChatCompletionRequest) -> AsyncGenerator[ChatCompletionChunk]:
        """One completion in chunks."""
        ...

    async def health(self, url: str) -> Health:
        """What the engine offers."""
        ...


def cost(request: ChatCompletionRequest) -> int:
    """Tokens that a request may still make an engine work on: prompt once, samples up to their limit."""
    prompt = len(request.prompt_token_ids or request.continue_token_ids or ())
    if not request.prompt_token_ids:
        prompt += sum(len(message.content) for message in (request.messages or [])[request.continue_from or 0 :]) // 4
    return prompt + request.n * (request.token_limit or _DEFAULT_TOKENS)


@final
class EnginePool:
    """Used from one event loop."""

    def __init__(
        self,
        client: ChatClient,
        urls: Iterable[str] = (),
        *,
        deadline_s: float = 600.0,
        suspect_s: float = 2.0,
        min_epoch: int = 0,
        interval_s: float = 1.0,
        ties: str = "",
    ) -> None:
        """
        Args:
            deadline_s: longest time for one request, all tries together.
            suspect_s: how long an engine is avoided after it failed, or let a deadline pass.
            min_epoch: what weights of an earlier epoch have sampled is no answer. In a run, 1: an engine that answers
                with epoch 0 has restarted, and serves what it was started with until it is given weights again.
            interval_s: how often what an engine has sampled comes; 0: when the answer is whole, and not before.
            ties: of engines that have as little to do, which comes first; see `LeastBusy`.
        """
        self._client = client
        self._deadline_s = deadline_s
        self._suspect_s = suspect_s
        self._min_epoch = min_epoch
        self._interval_s = interval_s
        self._offers: dict[str, Continuation] = {}
        self._serving: frozenset[str] = frozenset()
        self._known: frozenset[str] = frozenset()  # those that serve, and those that end what they have
        self._load = LeastBusy(ties)  # of every engine at which something runs, whatever its standing
        self._suspect_until: dict[str, float] = {}
        self._running: dict[str, set[asyncio.Timeout]] = {}
        self._named: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self.update(urls)

    @property
    def outstanding(self) -> Mapping[str, int]:
        """Tokens asked for and not yet answered, by engine that serves."""
        return self._load.outstanding

    def update(self, urls: Iterable[str], *, finishing: Iterable[str] = ()) -> None:
        """Use these engines from now on; those that are `finishing` may end what they have, others may not."""
        self._serving = frozenset(urls)
        self._known = self._serving | frozenset(finishing)
        self._load.serve(self._serving)
        for url in self._running.keys() - self._known:
            for scope in self._running.pop(url):
                if not scope.expired():
                    scope.reschedule(asyncio.get_running_loop().time())
        self._suspect_until = {url: at for url, at in self._suspect_until.items() if url in self._serving}
        self._offers = {url: offer for url, offer in self._offers.items() if url in self._known}
        self._changed.set()

    async def complete(
        self,
        request: ChatCompletionRequest,
        *,
        begun: Callable[[], None] = lambda: None,
        engine: str = "",
        near: str = "",
    ) -> Answered:
        """Answer `request`; give it a seed, or each try draws its own noise.

        `begun` is called whenever an engine is asked from the beginning, and not when it goes on with what there is.
        With `engine` (base URL), by that one alone, which is left to such requests while there are any. With `near`, by
        that one unless it has more than `NEAR_TOKENS` more to do than the least busy: it may have cached the prompt.

        Raises:
            ContractError: every engine that serves has refused the request itself; it is the last one's, and names it.
            EngineUnreachable: `engine` neither may be given work, nor may it finish what it has.
            DeadlineError: no engine answered in time; the message names the last failure.
        """
        deadline = time.monotonic() + self._deadline_s
        pause_s, last, asked = _FIRST_PAUSE_S, "no engine is known", ""
        refused, faults = dict[str, ContractError](), Counter[str]()
        answer = PartialAnswer(request, interval_s=self._interval_s)
        while (remaining := deadline - time.monotonic()) > 0:
            if answer.is_whole:  # the stream broke off at its very end
                return Answered(answer.completion(), asked, answer.tokens_kept, answer.tokens_resampled)
            url = self._choice(engine, refused, near)
            if url is None:
                await self._change(min(pause_s, remaining))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            continued, asked = answer.num_tokens > 0, url
            try:
                self._named[engine] += 1
                async with asyncio.timeout(remaining) as scope:
                    completion = await self._tried(url, request, answer, begun, scope)
                    return Answered(completion, url, answer.tokens_kept, answer.tokens_resampled)
            except _ELSEWHERE as error:
                last = f"{url}: {error}"
                self._offers.pop(url, None)
                self._suspect_until[url] = time.monotonic() + _suspicion(error, self._suspect_s, pause_s)
            except ContractError as error:
                last = f"{url}: {error}"
                answer.forget()
                faults[url] += 1
                if type(error) is ContractError and faults[url] < _FAULTS:
                    self._suspect_until[url] = time.monotonic() + self._suspect_s
                elif not continued:
                    refused[url] = error
            except TimeoutError:
                if url in self._known:
                    last = f"{url} had not answered after {remaining:.1f} s"
                    self._suspect_until[url] = time.monotonic() + self._suspect_s
                else:
                    last = f"{url} was taken out while it worked"
            finally:
                self._named[engine] -= 1
                answer.hand_over()
        raise self._deadline_error(last)

    def _deadline_error(self, last: str) -> DeadlineError:
        known = ", ".join(sorted(self._serving)) or "none"
        return DeadlineError(
            f"no engine completed the request within {self._deadline_s:g} s (engines: {known}); last: {last}"
        )

    def _choice(self, engine: str, refused: Mapping[str, ContractError], near: str) -> str | None:
        """The engine to ask: the one that is named, or that with the fewest outstanding tokens, of those that nobody
        names now; None while those are suspect.

        Raises as `complete` does, but for its deadline.
        """
        if engine and self._known and engine not in self._known:
            raise EngineUnreachable(f"{engine}, which alone may answer, is not part of the run any more")
        able = self._known & {engine} if engine else self._serving
        if able and able <= refused.keys():
            url, error = list(refused.items())[-1]
            raise type(error)(f"{url}: {error.message}", param=error.param) from error
        now = time.monotonic()
        if engine:
            return engine if able and engine not in refused and self._suspect_until.get(engine, 0.0) <= now else None

        def passed_over(url: str) -> bool:
            return url in refused or self._named[url] > 0 or self._suspect_until.get(url, 0.0) > now

        least = self._load.pick(passed_over)
        if least is None or near not in self._serving or passed_over(near):
            return least
        outstanding = self._load.outstanding
        return near if outstanding[near] <= outstanding[least] + NEAR_TOKENS else least

    async def _tried(
        self,
        url: str,
        request: ChatCompletionRequest,
        answer: PartialAnswer,
        begun: Callable[[], None],
        scope: asyncio.Timeout,
    ) -> ChatCompletion:
        tokens = cost(request)
        self._load.add(url, tokens)
        self._running.setdefault(url, set()).add(scope)
        try:
            if await self._comes_in_parts(url, request):
                return await self._in_parts(url, answer, begun)
            answer.forget()
            begun()
            completion = await self._client.chat(url, request)
        finally:
            self._running.get(url, set()).discard(scope)
            self._load.add(url, -tokens)
        self._check_epoch(completion.epoch)
        return completion

    async def _comes_in_parts(self, url: str, request: ChatCompletionRequest) -> bool:
        if not self._interval_s or not request.return_token_ids:
            return False
        if url not in self._offers:
            self._offers[url] = (await self._client.health(url)).continuation
        return self._offers[url] is not Continuation.NONE

    async def _in_parts(self, url: str, answer: PartialAnswer, begun: Callable[[], None]) -> ChatCompletion:
        while True:
            if not answer.num_tokens:
                begun()
            async with aclosing(self._client.stream(url, answer.rest())) as chunks:
                async for chunk in chunks:
                    self._check_epoch(chunk.epoch)
                    if not answer.take(chunk, url=url):
                        break
                else:
                    if not answer.is_whole:
                        raise EngineUnreachable(f"{url} ended a stream before all of its choices had ended")
                    return answer.completion()
            answer.forget()  # weights of another epoch would go on with it

    def _check_epoch(self, epoch: int) -> None:
        if epoch < self._min_epoch:
            raise Dirty(f"it serves weights of epoch {epoch}, not those of this run: has it restarted?")

    async def _change(self, timeout_s: float) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return


def _suspicion(error: ContractError | EngineUnreachable, suspect_s: float, pause_s: float) -> float:
    """A full engine is free again soon; a broken one is not."""
    return pause_s if isinstance(error, Overloaded) else suspect_s
