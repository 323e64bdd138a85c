"""`OpenAIServer`: a client for text answers from any server that offers OpenAI's chat completions API.

It sends only OpenAI's own fields, and requests one sample at a time, since not all servers support `n`. If the server
is busy or unreachable, a call is retried with the same seed until its deadline, after the pause that the server
requests. The error for a rejected request or a response in another form names the URL and quotes the server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import Any, Final, NamedTuple, Self

from inference_contract import routes
from inference_contract.schemas import FinishReason
from pipelinerl.errors import AddressError, DeadlineError, EngineUnreachable, reason_of
from pipelinerl.system.outside import OutsideClient, OutsideUnreachable, ResponseRejected
from pipelinerl.types import Message, Sampling

_LIST_S: Final = 10.0
_OK: Final = 200
#: Statuses with which servers reject a field of the request.
_FIELD_REJECTED: Final = (400, 422)
#: Maximum number of characters to quote of a server's error text.
_QUOTED_CHARS: Final = 300
#: Maximum number of tokens that a server can report.
_MOST_TOKENS: Final = 2**40
#: Bound on seeds, because some servers keep a seed in a signed 32-bit integer.
SEEDS: Final = 2**31
_SAME: Final[Mapping[str, str]] = MappingProxyType({})


class TextAnswer(NamedTuple):
    """One sample: its text, its finish reason, and the numbers of its sampled and prompt tokens, if known."""

    text: str
    finish_reason: str
    num_tokens: int | None
    prompt_tokens: int | None = None


class OpenAIServer:
    """Client of one server, used from one event loop.

    Args:
        url: base URL without `/v1`.
        deadline_s: limit on one sample, including its retries.
        fields: other names of request fields (`max_tokens`, `temperature`, `top_p`, `seed`); "" leaves a field out.
    """

    def __init__(
        self, url: str, *, model: str, token: str | None, deadline_s: float, fields: Mapping[str, str] = _SAME
    ) -> None:
        self.url = url
        self.model = model
        self._deadline_s = deadline_s
        self._fields = fields
        self._client = OutsideClient(token=token)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._client.close()

    async def sample(self, messages: tuple[Message, ...], sampling: Sampling, *, seed: int) -> TextAnswer:
        """Return one sample. Raises `EngineUnreachable` if the server rejects the request, `DeadlineError` if late."""
        options = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
            "seed": seed % SEEDS,
        }
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": each.role, "content": each.content} for each in messages],
            **{name: value for field, value in options.items() if (name := self._fields.get(field, field))},
        }
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        return _answer_of(await self._posted(json.dumps(body).encode()), self.url)

    async def _posted(self, body: bytes) -> Any:
        try:
            response = await self._client.post_until(
                self.url + routes.CHAT_COMPLETIONS, body, timeout_s=self._deadline_s
            )
            if response.status == _OK:
                return response.json()
        except TimeoutError as error:
            raise DeadlineError(f"{self.url} had no answer within {self._deadline_s:g} s; last: {error}") from None
        except ResponseRejected as error:
            raise EngineUnreachable(f"the response of {self.url} is rejected: {error}") from None
        except ValueError as error:
            raise EngineUnreachable(f"{self.url} must answer in JSON: {error}") from None
        refusal = f"HTTP {response.status}: {response.quoted()}"
        refused = (name for name in ("max_tokens", "temperature", "top_p", "seed") if name in response.quoted())
        if response.status in _FIELD_REJECTED and (name := next(refused, None)):
            refusal += f"; a judge's request_fields can rename {name}, or leave it out"
        raise EngineUnreachable(f"{self.url} refused the request: {refusal}")


async def models_at(url: str, *, token: str | None) -> list[dict[str, Any]]:
    """Return the cards of the models that the server at `url` lists. Raises `AddressError` if it sends no list."""
    call, client = f"GET {url}{routes.MODELS}", OutsideClient(token=token)
    try:
        response = await client.get(url + routes.MODELS, timeout_s=_LIST_S)
        if response.status != _OK:
            raise AddressError(f"{call} failed: HTTP {response.status}: {response.quoted()}")
        cards = [dict(card) for card in response.json()["data"]]
    except (OutsideUnreachable, ResponseRejected, TimeoutError) as error:
        raise AddressError(f"{call} failed: {reason_of(error)}; is the server running?") from None
    except (ValueError, LookupError, TypeError):
        raise AddressError(
            f"{call} must list models as OpenAI's API does; is this a server of language models?"
        ) from None
    finally:
        await client.close()
    if not cards or not all(isinstance(card.get("id"), str) for card in cards):
        raise AddressError(f"{call} must name at least one model")
    return cards


def _answer_of(answer: Any, url: str) -> TextAnswer:
    try:
        choice = answer["choices"][0]
        usage = answer.get("usage") or {}
        return TextAnswer(
            _text_of(choice["message"]["content"]),
            _text_of(choice.get("finish_reason")) or FinishReason.STOP,
            _count(usage.get("completion_tokens")),
            _count(usage.get("prompt_tokens")),
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"[:_QUOTED_CHARS]
        raise EngineUnreachable(f"{url} must answer with a chat completion in OpenAI's shape; {reason}") from None


def _text_of(content: Any) -> str:
    """Return a content, which is a text, null or a list of parts, as text without lone surrogates."""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content if part.get("type") in ("text", "output_text"))
    if content is not None and not isinstance(content, str):
        raise ValueError(f"it must be a text or a list of parts, got a value of type {type(content).__name__}")
    return (content or "").encode("utf-8", "replace").decode()


def _count(tokens: Any) -> int | None:
    """Return a reported number of tokens; None if the server does not report it."""
    if tokens is None:
        return None
    if isinstance(tokens, bool) or not isinstance(tokens, int | float) or not 0 <= tokens <= _MOST_TOKENS:
        raise ValueError(f"usage must hold numbers of tokens, got {str(tokens)[:40]}")
    return int(tokens)
