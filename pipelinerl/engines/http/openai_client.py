"""`OpenAIServer`: a client for text answers from any server that offers OpenAI's chat completions API.

It sends only OpenAI's own fields, and requests one sample at a time, since not all servers support `n`. If the server
is busy or unreachable, a call is retried with the same seed until its deadline. The error for a rejected request names
the URL and quotes the server.
"""

from __future__ import annotations

import asyncio
import json
import time
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, final

import httpx

from inference_contract import routes
from inference_contract.schemas import FinishReason
from pipelinerl.errors import AddressError, DeadlineError, EngineUnreachable
from pipelinerl.system.http_client import async_session
from pipelinerl.types import Message, Sampling

_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 5.0
#: HTTP statuses after which the request is retried, because the server's state causes them, not the request.
_RETRIED: Final = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
#: Maximum number of characters to quote of a server's error text.
_QUOTED_CHARS: Final = 300
#: Bound on seeds, because some servers keep a seed in a signed 32-bit integer.
SEEDS: Final = 2**31


class TextAnswer(NamedTuple):
    """One sample: its text, its finish reason, and the numbers of its sampled and prompt tokens, if known."""

    text: str
    finish_reason: str
    num_tokens: int | None
    prompt_tokens: int | None = None


@final
class OpenAIServer:
    """Client of one server, used from one event loop."""

    def __init__(self, url: str, *, model: str, token: str | None, deadline_s: float) -> None:
        """Create a client for the base `url` without `/v1`; `deadline_s` limits one sample, including its retries."""
        self.url = url
        self.model = model
        self._deadline_s = deadline_s
        self._session = async_session(url, token=token, timeout_s=deadline_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections to the server."""
        await self._session.aclose()

    async def sample(self, messages: tuple[Message, ...], sampling: Sampling, *, seed: int) -> TextAnswer:
        """Return one sample. Raises `EngineUnreachable` if the server rejects the request, `DeadlineError` if late."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": each.role, "content": each.content} for each in messages],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
            "seed": seed % SEEDS,
        }
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        return _answer_of(await self._posted(body), self.url)

    async def _posted(self, body: dict[str, Any]) -> Any:
        deadline, pause_s, last = time.monotonic() + self._deadline_s, _FIRST_PAUSE_S, ""
        while (remaining := deadline - time.monotonic()) > 0:
            try:
                response = await self._session.post(routes.CHAT_COMPLETIONS, json=body, timeout=remaining)
                if response.status_code == httpx.codes.OK:
                    return response.json()
            except httpx.TimeoutException:
                last = f"it had not answered after {remaining:.1f} s"
                break
            except httpx.HTTPError as error:
                last = str(error) or type(error).__name__
            except ValueError as error:
                raise EngineUnreachable(f"{self.url} must answer in JSON: {error}") from None
            else:
                last = f"HTTP {response.status_code}: {_quoted(response)}"
                if response.status_code not in _RETRIED:
                    raise EngineUnreachable(f"{self.url} refused the request: {last}")
            await asyncio.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise DeadlineError(f"{self.url} had no answer within {self._deadline_s:g} s; last: {last}")


async def models_at(url: str, *, token: str | None) -> list[dict[str, Any]]:
    """Return the cards of the models that the server at `url` lists. Raises `AddressError` if it sends no list."""
    call = f"GET {url}{routes.MODELS}"
    try:
        async with async_session(url, token=token) as session:
            response = await session.get(routes.MODELS)
        if response.status_code != httpx.codes.OK:
            raise AddressError(f"{call} failed: HTTP {response.status_code}: {_quoted(response)}")
        cards = [dict(card) for card in response.json()["data"]]
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise AddressError(f"{call} failed: {str(error) or type(error).__name__}; is the server running?") from None
    except (ValueError, LookupError, TypeError):
        raise AddressError(
            f"{call} must list models as OpenAI's API does; is this a server of language models?"
        ) from None
    if not cards or not all(isinstance(card.get("id"), str) for card in cards):
        raise AddressError(f"{call} must name at least one model")
    return cards


def _answer_of(answer: Any, url: str) -> TextAnswer:
    try:
        choice = answer["choices"][0]
        usage = answer.get("usage") or {}
        tokens, prompt_tokens = (usage.get(name) for name in ("completion_tokens", "prompt_tokens"))
        reason = choice.get("finish_reason") or FinishReason.STOP
        return TextAnswer(
            choice["message"]["content"] or "",
            str(reason),
            None if tokens is None else int(tokens),
            None if prompt_tokens is None else int(prompt_tokens),
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise EngineUnreachable(
            f"{url} must answer with a chat completion in OpenAI's shape; {type(error).__name__}: {error}"
        ) from None


def _quoted(response: httpx.Response) -> str:
    try:
        message = response.json()["error"]["message"]
    except (json.JSONDecodeError, LookupError, TypeError):
        message = response.text
    return " ".join(str(message).split())[:_QUOTED_CHARS]
