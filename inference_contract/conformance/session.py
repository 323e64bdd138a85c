"""`Session`, an HTTP client for the engine under test; and `Load`, which keeps an engine busy during an update."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import httpx

from inference_contract import routes
from inference_contract.schemas import ChatCompletion, ChatCompletionChunk, Health, ModelCard, ModelList

#: The default conversation of the checks; any chat model can answer it.
MESSAGES: Final = [{"role": "user", "content": "1 + 2 = "}]


class NotOffered(Exception):
    """The engine or this machine cannot demonstrate a promise; the check is reported as `unsupported`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The model and the arithmetic with which the kit compares an engine.

    Attributes:
        model: the directory of the model that the engine serves.
        precision: the precision of its arithmetic, one of `reference.PRECISIONS`; None means its layout's dtype.
        temperature: the run's temperature.
    """

    model: Path
    precision: str | None = None
    temperature: float = 1.0


class Session:
    """One run of the kit against one engine; the first weight check creates `peer`, its `KitTrainer`."""

    def __init__(
        self, url: str, *, token: str | None, timeout_s: float, host: str, expected: Expected | None = None
    ) -> None:
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self.expected = expected
        self.reference: Any = None  # the `Reference` that the first check that needs it has loaded
        self.token = token
        self.timeout_s = timeout_s
        self.host = host
        self.peer: Any = None
        self._client = httpx.Client(base_url=url, headers=headers, timeout=timeout_s, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.peer is not None:
            self.peer.close()
        self._client.close()

    def get(self, path: str, **options: Any) -> httpx.Response:
        """Send a GET; accept any status."""
        return self._client.get(path, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """POST a JSON body or raw bytes; accept any status."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._client.post(path, content=content, headers={"content-type": "application/json"}, **options)

    def without_token(self, path: str) -> httpx.Response:
        """Send a GET with a wrong bearer token; accept any status."""
        return self._client.get(path, headers={"authorization": "Bearer wrong"})

    def health(self) -> Health:
        return Health.model_validate(succeeded(self.get(routes.HEALTH)))

    def card(self) -> ModelCard:
        models = ModelList.model_validate(succeeded(self.get(routes.MODELS)))
        assert len(models.data) == 1, f"/v1/models must list the one model served, it lists {len(models.data)}"
        return models.data[0]

    def chat(self, path: str = routes.CHAT_COMPLETIONS, **fields: Any) -> ChatCompletion:
        """Return a completion, by default a short one of `MESSAGES` with token ids; fail if the request fails."""
        return ChatCompletion.model_validate(succeeded(self.post(path, body(**fields))))

    def completed(self, **fields: Any) -> httpx.Response:
        """Return the unparsed response to a completion request; accept any status."""
        return self.post(routes.CHAT_COMPLETIONS, body(**fields))

    def stream(self, **fields: Any) -> Iterator[ChatCompletionChunk]:
        """Yield the chunks of a streamed completion as they arrive; the stream must end with `data: [DONE]`."""
        request = body(**fields) | {"stream": True}
        with self._client.stream("POST", routes.CHAT_COMPLETIONS, json=request) as response:
            yield from chunks(response, response.iter_lines())

    def streamed(self, **fields: Any) -> httpx.Response:
        """Return a complete streamed response for `chunks` to parse; faster than reading chunk by chunk."""
        return self.post(routes.CHAT_COMPLETIONS, body(**fields) | {"stream": True})

    def greedy(self) -> tuple[list[int], list[float]]:
        """Return token ids and log-probs of one greedy sample: a fingerprint of the served weights."""
        choice = self.chat(temperature=0.0, max_tokens=6).choices[0]
        assert choice.token_ids is not None and choice.token_logprobs is not None, "return_token_ids must be honoured"
        return choice.token_ids, choice.token_logprobs

    def generated_tokens(self) -> float:
        value = self._metric("generated_tokens_total")
        assert value is not None, "/metrics must have a sample whose name ends in 'generated_tokens_total'"
        return value

    def metric(self, name: str) -> float:
        """Return an optional metric of GET /metrics. Raises `NotOffered` if the engine lacks it."""
        value = self._metric(name)
        if value is None:
            raise NotOffered(f"/metrics has no sample whose name ends in {name!r}")
        return value

    def _metric(self, name: str) -> float | None:
        samples = [line for line in self.get(routes.METRICS).text.splitlines() if line[:1] != "#"]
        matching = [line for line in samples if name in line]
        return float(matching[0].rsplit(" ", 1)[1]) if matching else None

    def recover(self) -> None:
        """After a failed check, leave the group, so that the engine drops staged weights before the next check."""
        if self.peer is not None:
            self.peer.leave()


Check = Callable[[Session], str | None]


def checks_of(module: dict[str, Any], *, but: tuple[Check, ...] = ()) -> tuple[Check, ...]:
    """Return a module's checks so far, in order, without those in `but`.

    A check is a public function that takes a `session: Session`, and returns None or a text about what it has measured.
    """
    takes_session = ({"session": "Session", "return": "None"}, {"session": "Session", "return": "str | None"})
    public = (value for name, value in module.items() if callable(value) and name[0] != "_" and value not in but)
    return tuple(each for each in public if getattr(each, "__annotations__", {}) in takes_session)


def body(**fields: Any) -> dict[str, Any]:
    """Return the body of a chat request for a short answer with token ids."""
    prompt = {} if "prompt_token_ids" in fields else {"messages": MESSAGES}
    return prompt | {"max_tokens": 8, "seed": 1, "return_token_ids": True} | fields


def chunks(response: httpx.Response, lines: Iterable[str]) -> Iterator[ChatCompletionChunk]:
    """Parse the chunks of a server-sent event stream."""
    assert response.status_code == 200, f"a streamed completion must answer 200, got {response.status_code}"
    media = response.headers.get("content-type", "")
    assert media.startswith("text/event-stream"), f"a stream must be text/event-stream, got {media!r}"
    done = False
    for line in filter(None, lines):
        assert line.startswith("data: "), f"each event must be one line `data: …`, got {line[:40]!r}"
        assert not done, "nothing may follow `data: [DONE]`"
        done = line == "data: [DONE]"
        if not done:
            yield ChatCompletionChunk.model_validate_json(line.removeprefix("data: "))
    assert done, "a stream must end with `data: [DONE]`"


def succeeded(response: httpx.Response) -> Any:
    """Return the JSON of a response that must have status 200."""
    request = f"{response.request.method} {response.request.url.path}"
    assert response.status_code == 200, f"{request} must answer 200, got {response.status_code}: {response.text[:300]}"
    return response.json()


def refused(
    response: httpx.Response, *statuses: int, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """Return a response's error; fail unless status, error shape and, if given, `code` and `param` are as expected."""
    request = f"{response.request.method} {response.request.url.path}"
    expected = " or ".join(map(str, statuses))
    assert response.status_code in statuses, f"{request} must answer {expected}, got {response.status_code}"
    answer = response.json()
    error = answer.get("error") if isinstance(answer, dict) else None
    assert isinstance(error, dict), f"{request}: a refusal must have the shape {{'error': {{…}}}}"
    for name in ("message", "type", "param", "code"):
        assert name in error, f"{request}: the error must have a field {name!r}"
    assert isinstance(error["message"], str) and error["message"], f"{request}: the error's message must be a sentence"
    if code is not None:
        assert error["code"] == code, f"{request}: the error's code must be {code!r}, got {error['code']!r}"
    if param is not None:
        assert error["param"] == param, f"{request}: the error's param must be {param!r}, got {error['param']!r}"
    return error


_SENDERS: Final = 4


class Load:
    """Sends requests from several threads while the `with` block runs; `answers` is complete after the block.

    A fast engine may finish a single long request before an update commits. Therefore each of several threads sends a
    new request as soon as it has an answer, so that the engine is never idle. `send` takes a seed and returns an
    unparsed response, since parsing is slower than a fast engine's sampling. The first failure is raised when the block
    ends.
    """

    def __init__(self, session: Session, send: Callable[[int], httpx.Response]) -> None:
        self.answers: list[httpx.Response] = []
        self._sampled_before = 0.0
        self._session = session
        self._send = send
        self._seeds = itertools.count()
        self._ended = threading.Event()
        self._threads = ThreadPoolExecutor(_SENDERS)
        self._sending: list[Future[None]] = []

    def __enter__(self) -> Self:
        self._sampled_before, deadline = self._session.generated_tokens(), time.monotonic() + self._session.timeout_s
        self._sending = [self._threads.submit(self._run) for _ in range(_SENDERS)]
        while not self.sampled() and time.monotonic() < deadline:
            if any(request.done() for request in self._sending):
                break  # a request failed; `__exit__` raises the error
            time.sleep(0.001)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._ended.set()
        done, late = wait(self._sending, self._session.timeout_s)
        self._threads.shutdown(wait=False)
        if error is None:
            assert not late, f"answers must arrive within {self._session.timeout_s:g} s although the weights changed"
            for request in done:
                request.result()

    def sampled(self) -> float:
        """Return the number of tokens sampled since this load began, including those of unfinished answers."""
        return self._session.generated_tokens() - self._sampled_before

    def _run(self) -> None:
        while not self._ended.is_set():
            self.answers.append(self._send(next(self._seeds)))
