"""`EnginePool`: completes requests on the engine that is done first, while engines join, fail and leave.

A request is retried with the same seed until it is answered or its deadline passes, on another engine if there is one.
All samples of a request run on the same engine, which computes their prompt once.

Answers arrive in parts, so the tokens sampled so far survive an engine's failure or removal, and another engine
continues them (`PartialAnswer`). The request starts over if an engine cannot continue answers, rejects a continuation,
or serves weights of another epoch (trainer process) than the answer's.

An engine that rejects a request does not get that request again, but other engines do, since the engines of a run may
differ. Once all serving engines have rejected the request, the last error is raised. An unspecific fault
(`internal_error`) counts as a rejection only after `_FAULTS` times, because a closing engine may cause one for any
request. An engine that fails or misses a request's deadline is suspect for a while, and avoided during that time.

| waits for | unblocked by | or, at the latest |
|---|---|---|
| an engine that is not suspect | the end of its suspicion, or `update` | the pool's deadline |
| the completion | the engine, or `update` without it | the pool's deadline, after which the engine is suspect |
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from types import MappingProxyType
from typing import Final

from inference_contract.errors import ContractError, DeadlineExceeded, Dirty, EngineStopped, Overloaded
from inference_contract.routed_experts import RoutedExperts
from inference_contract.schemas import (
    AnswerPrefix,
    AssistantMessage,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    Choice,
    ChunkChoice,
    Continuation,
    FinishReason,
    Span,
    StreamOptions,
    Usage,
)
from inference_contract.tools import FunctionCall, ToolCall
from pipelinerl import rng
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.errors import DeadlineError, EngineUnreachable
from pipelinerl.types import Answered


@dataclass(slots=True)
class _Sample:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    routed: list[RoutedExperts] = field(default_factory=list)
    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def take(self, part: ChunkChoice, *, url: str, routed: bool) -> None:
        token_ids, logprobs, spans = part.token_ids or [], part.token_logprobs or [], part.version_spans or []
        if not len(token_ids) == len(logprobs) == sum(count for _, count in spans) or self.finish_reason is not None:
            raise EngineUnreachable(
                f"{url} must stream as many log-probs as tokens, version spans over all of them, and nothing after the "
                f"finish reason; choice {part.index} came with {len(token_ids)} tokens, {len(logprobs)} log-probs and "
                f"spans {spans}. Run `pipelinerl conformance engine URL` against it"
            )
        if routed and token_ids:
            came = part.routed_experts
            like = self.routed[0] if self.routed else came
            if came is None or like is None or came.num_tokens != len(token_ids) or not came.is_like(like):
                raise EngineUnreachable(
                    f"{url} must stream the routed experts of each new token, of one model, when return_routed_experts "
                    f"is set; choice {part.index} came with {len(token_ids)} tokens and experts of shape "
                    f"{came and came.shape}"
                )
            self.routed.append(came)
        self.token_ids += token_ids
        self.logprobs += logprobs
        for version, count in spans:
            if self.spans and self.spans[-1][0] == version:
                self.spans[-1] = version, self.spans[-1][1] + count
            else:
                self.spans.append((version, count))
        self.text += part.delta.content or ""
        self.calls += [
            ToolCall(
                id=call.id or "",
                function=FunctionCall(name=call.function.name or "", arguments=call.function.arguments or ""),
            )
            for call in part.delta.tool_calls or ()
        ]
        self.finish_reason = part.finish_reason

    def choice(self, index: int) -> Choice:
        assert self.finish_reason is not None
        return Choice(  # up to hundreds of tokens, validation is faster than `model_construct`
            index=index,
            message=AssistantMessage(content=self.text, tool_calls=self.calls or None),
            finish_reason=self.finish_reason,
            token_ids=self.token_ids,
            token_logprobs=self.logprobs,
            version_spans=self.spans,
            routed_experts=RoutedExperts.joined(self.routed) if self.routed else None,
        )


class PartialAnswer:
    """The received part of an answer to `request`, without I/O. Engines are asked to send a chunk every `interval_s`.

        request ─▶ engine a: chunk, chunk, dies ─▶ `rest` ─▶ engine b: chunk, chunk, end ─▶ `completion`

    The next engine samples only the missing part of each sample, after the exact prompt tokens of the first engine.
    Version spans follow the tokens, so the next engine may serve an older version. Routed experts of the prompt come
    from the first engine. All tokens of an answer must have the epoch of the weights that began it, because weights of
    another epoch may come from a diverging training history.
    """

    def __init__(self, request: ChatCompletionRequest, *, interval_s: float) -> None:
        self._request = request
        self._options = StreamOptions(interval_s=interval_s)
        self._last: ChatCompletionChunk | None = None
        self._prompt: list[int] | None = None
        self._prompt_routed: RoutedExperts | None = None
        self._samples: dict[int, _Sample] = {index: _Sample() for index in range(request.n)}
        self._handed_over = 0  # tokens received before the current engine took over
        self.engines: dict[str, None] = {}
        """Base URLs of the engines that sampled the received tokens, in order."""
        self.tokens_kept = 0
        """Tokens of the answer from engines that did not finish it."""
        self.tokens_resampled = 0
        """Tokens that were received and dropped, so another engine samples them again."""

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self._samples.values())

    @property
    def text(self) -> str:
        """The received text of the first sample; an engine that takes over sends it from its beginning."""
        return self._samples[0].text

    @property
    def is_whole(self) -> bool:
        return all(sample.finish_reason is not None for sample in self._samples.values())

    def rest(self) -> ChatCompletionRequest:
        """Return the next engine's request.

        It is the original request if no tokens have arrived. Otherwise it requests the missing tokens of each
        unfinished sample. The next engine sends the whole text of these samples, so their received text is dropped.
        """
        changes: dict[str, object] = {"stream": True, "stream_options": self._options}
        if self._prompt is not None:
            missing = {index: sample for index, sample in self._samples.items() if sample.finish_reason is None}
            for sample in missing.values():
                sample.text = ""
            prefixes = [AnswerPrefix(index=i, token_ids=list(sample.token_ids)) for i, sample in missing.items()]
            changes |= {"messages": None, "prompt": None, "prompt_token_ids": self._prompt}
            changes |= {"n": len(missing), "prefixes": prefixes}
            # these two fields are already contained in `prompt_token_ids`
            changes |= {"continue_token_ids": None, "continue_from": None}
        return self._request.model_copy(update=changes)

    def take(self, chunk: ChatCompletionChunk, *, url: str) -> bool:
        """Add a chunk; return False if its epoch is not the answer's. Raises `EngineUnreachable` if malformed."""
        if self._last is not None and chunk.epoch != self._last.epoch:
            return False
        if self._prompt is None:
            if chunk.prompt_token_ids is None:
                raise EngineUnreachable(f"{url} must begin a stream with prompt_token_ids when return_token_ids is set")
            self._prompt, self._prompt_routed = chunk.prompt_token_ids, chunk.prompt_routed_experts
        for part in chunk.choices:
            if part.index not in self._samples:
                raise EngineUnreachable(f"{url} streams choice {part.index}, which was not requested")
            self._samples[part.index].take(part, url=url, routed=self._request.return_routed_experts)
            if part.token_ids:
                self.engines[url] = None
        self._last = chunk
        return True

    def hand_over(self) -> None:
        """Record that the current engine has stopped; the tokens received so far are kept for the next engine."""
        self.tokens_kept += self.num_tokens - self._handed_over
        self._handed_over = self.num_tokens

    def forget(self) -> None:
        """Drop the received tokens, so that the next engine starts over."""
        self.tokens_resampled += self.num_tokens
        self.tokens_kept = self._handed_over = 0
        self.engines.clear()
        self._samples = {index: _Sample() for index in self._samples}
        self._last = self._prompt = self._prompt_routed = None

    def answered(self, completion: ChatCompletion, url: str) -> Answered:
        """Return the completion with the engine that finished it, `url`, and the counts of this answer."""
        others = tuple(each for each in self.engines if each != url)
        return Answered(completion, url, self.tokens_kept, self.tokens_resampled, others)

    def completion(self) -> ChatCompletion:
        """Return the whole answer, as one engine would have sent it. Every sample must have ended."""
        last, prompt, tokens = self._last, self._prompt, self.num_tokens
        assert last is not None and prompt is not None
        return ChatCompletion(
            id=last.id,
            created=last.created,
            model=last.model,
            choices=[sample.choice(index) for index, sample in self._samples.items()],
            usage=Usage(prompt_tokens=len(prompt), completion_tokens=tokens, total_tokens=len(prompt) + tokens),
            prompt_token_ids=prompt,
            prompt_routed_experts=self._prompt_routed,
            model_version=max((version for s in self._samples.values() for version, _ in s.spans), default=0),
            epoch=last.epoch,
        )


#: The most heap entries per engine; beyond this, the stale entries are removed.
_ENTRIES: Final = 4


class LeastBusy:
    """Engines by base URL, with their outstanding tokens; picks the one that is done first. Pure: no I/O.

    An engine needs its outstanding tokens plus those of the request, divided by its speed.

    A heap makes the cost almost independent of the number of engines; stale entries are dropped at its top. Ties are
    broken by name or, with `ties`, in a pseudorandom order. If several clients, which count only their own tokens,
    broke ties in the same order, they would all start with the same engines.
    """

    def __init__(self, ties: str = "") -> None:
        self._ties = ties
        self._tokens: Counter[str] = Counter()
        self._rank: dict[str, tuple[int, str]] = {}  # has an entry for each engine that may be picked
        self._heap: list[tuple[int, tuple[int, str]]] = []  # of the engines that are as fast as most
        self._speeds: dict[str, float] = {}  # of the other engines

    def serve(self, urls: Iterable[str], speeds: Mapping[str, float] = MappingProxyType({})) -> None:
        """Set the engines that may be picked, and speeds other than 1; all engines keep their token counts."""
        serving, others = set(urls), {url: speed for url, speed in speeds.items() if speed > 0}
        if serving == self._rank.keys() and others == self._speeds:
            return
        self._speeds = others
        ties, known = self._ties, self._rank
        self._rank = {url: known.get(url) or (rng.key(0, ties, url) if ties else 0, url) for url in serving}
        self._sweep()

    def add(self, url: str, tokens: int) -> None:
        """Add to an engine's outstanding tokens; a negative number subtracts."""
        self._tokens[url] += tokens
        if url in self._rank and url not in self._speeds:
            heappush(self._heap, (self._tokens[url], self._rank[url]))
            if len(self._heap) > _ENTRIES * (len(self._rank) + 16):
                self._sweep()
        elif url not in self._rank and not self._tokens[url]:
            del self._tokens[url]

    def done_after(self, url: str, tokens: int) -> float:
        """Return when the engine would finish a request of this many tokens, in tokens of an engine of speed 1."""
        return (self._tokens[url] + tokens) / self._speeds.get(url, 1.0)

    def pick(self, passed_over: Callable[[str], bool], tokens: int = 0) -> str | None:
        """Return the engine that would be done first with that many more tokens; None if all are `passed_over`."""
        best = self._least(passed_over)
        able = [url for url in self._speeds if url in self._rank and not passed_over(url)]
        able += [] if best is None else [best]
        return min(able, key=lambda url: (self.done_after(url, tokens), self._rank[url]), default=None)

    def _least(self, passed_over: Callable[[str], bool]) -> str | None:
        aside: list[tuple[int, tuple[int, str]]] = []
        found = None
        while self._heap:
            tokens, (_, url) = entry = self._heap[0]
            if (
                url not in self._rank
                or url in self._speeds
                or tokens != self._tokens[url]
                or (aside and aside[-1] == entry)
            ):
                heappop(self._heap)
            elif passed_over(url):
                aside.append(heappop(self._heap))
            else:
                found = url
                break
        for entry in aside:
            heappush(self._heap, entry)
        return found

    def _sweep(self) -> None:
        self._heap = [(self._tokens[url], rank) for url, rank in self._rank.items() if url not in self._speeds]
        heapify(self._heap)


#: Errors after which the request is retried, because the engine's state causes them, not the request.
_RETRIED: Final = (Overloaded, Dirty, EngineStopped, DeadlineExceeded, EngineUnreachable)
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 2.0
_DEFAULT_TOKENS: Final = 256
_FAULTS: Final = 3
#: A conversation stays on its engine if this engine has at most `NEAR_TOKENS` more outstanding tokens than the least
#: busy one.
NEAR_TOKENS: Final = 8192


def cost(request: ChatCompletionRequest) -> int:
    """Estimate the most tokens to compute: the prompt once, a token per 4 characters, and each sample to its limit."""
    prompt = len(request.prompt_token_ids or request.continue_token_ids or ())
    if not request.prompt_token_ids:
        prompt += sum(len(message.content) for message in (request.messages or [])[request.continue_from or 0 :]) // 4
    return prompt + request.n * (request.token_limit or _DEFAULT_TOKENS)


#: Function of an engine's URL, a request and the prompt's tokens; raises `ContractError` for a wrong prompt.
CheckPrompt = Callable[[str, ChatCompletionRequest, list[int]], Awaitable[None]]


class EnginePool:
    """Pool of engines, used from one event loop."""

    def __init__(
        self,
        client: EngineClient,
        urls: Iterable[str] = (),
        *,
        deadline_s: float = 600.0,
        suspect_s: float = 2.0,
        min_epoch: int = 0,
        interval_s: float = 1.0,
        ties: str = "",
        check_prompt: CheckPrompt | None = None,
    ) -> None:
        """Create a pool; each request has `deadline_s` for all its tries.

        Args:
            suspect_s: the time for which an engine is avoided after it failed or missed a deadline.
            min_epoch: the lowest accepted epoch of weights; 1 in a run, since a restarted engine has epoch 0 until an
                update.
            interval_s: the interval at which sampled tokens arrive; 0 requests whole answers.
            ties: determines the order of equally busy engines; see `LeastBusy`.
            check_prompt: rejects an answer to another prompt than the request's; an engine is not used for a request
                whose prompt it renders wrongly.
        """
        self._check_prompt = check_prompt
        self._client = client
        self._deadline_s = deadline_s
        self._suspect_s = suspect_s
        self._min_epoch = min_epoch
        self._interval_s = interval_s
        self._offers: dict[str, Continuation] = {}
        self._serving: frozenset[str] = frozenset()
        self._known: frozenset[str] = frozenset()  # engines that serve or may finish requests
        self._load = LeastBusy(ties)  # also counts requests on engines that no longer serve
        self._suspect_until: dict[str, float] = {}
        self._running: dict[str, set[asyncio.Timeout]] = {}
        self._named: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self.update(urls)

    def update(
        self, urls: Iterable[str], *, finishing: Iterable[str] = (), speeds: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        """Set the serving engines. Engines in `finishing` are no longer picked, but may finish their requests.

        `speeds` are the engines' speeds where they differ from 1; work follows speed (`LeastBusy`).

        Requests on any other engine are interrupted and continue on a serving engine.
        """
        self._serving = frozenset(urls)
        self._known = self._serving | frozenset(finishing)
        self._load.serve(self._serving, speeds)
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
        on_text: Callable[[str], None] | None = None,
    ) -> Answered:
        """Answer `request`. Without a seed in the request, each try draws its own noise.

        With `engine` (base URL), only this engine answers, and it gets no other requests meanwhile. With `near` (base
        URL), that engine answers, since it may have cached the prompt, unless it has over `NEAR_TOKENS` more
        outstanding tokens than the least busy engine. `begun` is called whenever a try starts without earlier tokens.
        `on_text` gets the text of the first sample so far, token by token; it starts over when another try takes over.

        Raises:
            ContractError: every serving engine has rejected the request; this is the last engine's error, which names
                the engine.
            EngineUnreachable: `engine` is neither serving nor finishing.
            DeadlineError: no engine answered in time; the message names the last failure.
        """
        deadline = time.monotonic() + self._deadline_s
        pause_s, last, engine_used = _FIRST_PAUSE_S, "no engine is known", ""
        refused, faults = dict[str, ContractError](), Counter[str]()
        answer = PartialAnswer(request, interval_s=0.0 if on_text else self._interval_s)
        tokens = cost(request)
        while (remaining := deadline - time.monotonic()) > 0:
            if answer.is_whole:  # all samples ended before the stream broke off
                return answer.answered(answer.completion(), engine_used)
            url = self._choice(engine, refused, near, tokens)
            if url is None:
                self._changed.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), min(pause_s, remaining))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            continued, engine_used = answer.num_tokens > 0, url
            try:
                self._named[engine] += 1
                async with asyncio.timeout(remaining) as scope:
                    completion = await self._attempt(url, request, answer, begun, scope, on_text)
                    if self._check_prompt is not None and not continued and completion.prompt_token_ids:
                        await self._check_prompt(url, request, completion.prompt_token_ids)
                    return answer.answered(completion, url)
            except _RETRIED as error:
                last = f"{url}: {error}"
                self._offers.pop(url, None)
                avoided_s = pause_s if isinstance(error, Overloaded) else self._suspect_s
                self._suspect_until[url] = time.monotonic() + avoided_s
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
                    last = f"{url} was removed while it worked"
            finally:
                self._named[engine] -= 1
                answer.hand_over()
        known = ", ".join(sorted(self._serving)) or "none"
        raise DeadlineError(
            f"no engine completed the request within {self._deadline_s:g} s (engines: {known}); last: {last}"
        )

    def _choice(self, engine: str, refused: Mapping[str, ContractError], near: str, tokens: int) -> str | None:
        """Return `engine` if given, else `near` or the least busy; None while all are suspect, reserved or refused."""
        if engine and self._known and engine not in self._known:
            raise EngineUnreachable(f"{engine}, the only engine for this request, is no longer part of the run")
        able = self._known & {engine} if engine else self._serving
        if able and able <= refused.keys():
            url, error = list(refused.items())[-1]
            raise type(error)(f"{url}: {error.message}", param=error.param) from error
        now = time.monotonic()
        if engine:
            return engine if able and engine not in refused and self._suspect_until.get(engine, 0.0) <= now else None

        def passed_over(url: str) -> bool:
            return url in refused or self._named[url] > 0 or self._suspect_until.get(url, 0.0) > now

        least = self._load.pick(passed_over, tokens)
        if least is None or near not in self._serving or passed_over(near):
            return least
        near_done, least_done = (self._load.done_after(url, tokens) for url in (near, least))
        return near if near_done <= least_done + NEAR_TOKENS else least

    async def _attempt(
        self,
        url: str,
        request: ChatCompletionRequest,
        answer: PartialAnswer,
        begun: Callable[[], None],
        scope: asyncio.Timeout,
        on_text: Callable[[str], None] | None,
    ) -> ChatCompletion:
        tokens = cost(request)
        self._load.add(url, tokens)
        self._running.setdefault(url, set()).add(scope)
        try:
            streams = bool(self._interval_s) and request.return_token_ids
            if streams and url not in self._offers:
                self._offers[url] = (await self._client.health(url)).continuation
            if streams and self._offers[url] is not Continuation.NONE:
                return await self._streamed(url, answer, begun, on_text)
            answer.forget()
            begun()
            completion = await self._client.chat(url, request)
        finally:
            self._running.get(url, set()).discard(scope)
            self._load.add(url, -tokens)
        self._check_epoch(completion.epoch)
        return completion

    async def _streamed(
        self, url: str, answer: PartialAnswer, begun: Callable[[], None], on_text: Callable[[str], None] | None
    ) -> ChatCompletion:
        while True:
            if not answer.num_tokens:
                begun()
            async with aclosing(self._client.stream(url, answer.rest())) as chunks:
                async for chunk in chunks:
                    self._check_epoch(chunk.epoch)
                    if not answer.take(chunk, url=url):
                        break
                    if on_text is not None:
                        on_text(answer.text)
                else:
                    if not answer.is_whole:
                        raise EngineUnreachable(f"{url} ended a stream before all of its choices had ended")
                    return answer.completion()
            answer.forget()  # start over, because this engine's weights are of another epoch

    def _check_epoch(self, epoch: int) -> None:
        if epoch < self._min_epoch:
            raise Dirty(f"it serves weights of epoch {epoch}, not those of this run: has it restarted?")
