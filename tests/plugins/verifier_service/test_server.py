"""The verifier service judges answers, caches verdicts, rejects invalid requests, and cancels unneeded work."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest

from pipelinerl.plugins.verifier_service import wire
from pipelinerl.plugins.verifier_service.server import VerdictCache, create_app, keys_of
from pipelinerl.plugins.verifier_service.wire import ServedDomain, ServiceStatus, VerifyAnswer, VerifyRequest
from pipelinerl.system import http_service
from pipelinerl.system.http_service import OTHER_PROTOCOL
from pipelinerl.system.service_client import IS_FULL
from pipelinerl.types import Message, Outcome
from pipelinerl.verifiers.verifier import PerAnswerVerifier, SampledAnswer, correct, failed, wrong
from tests.fakes.verifier_service import RULES, TOKEN, problem, service
from tests.patience import PATIENCE_S


def test_verdict_cache_over_its_size_limit_evicts_the_least_recently_used_entry():
    cache = VerdictCache(4000)
    for number in range(100):
        cache.keep(b"first", correct("1"))  # a repeated entry's size must count only once
        cache.keep(b"%d" % number, wrong("x" * (number % 50)))
        assert cache.find(b"first") is not None
        assert cache.num_bytes <= 4000
    kept = [number for number in range(100) if cache.find(b"%d" % number) is not None]
    assert kept == list(range(kept[0], 100)) and 5 < len(kept) < 16
    nothing = VerdictCache(0)
    nothing.keep(b"k", correct("1"))
    assert (nothing.find(b"k"), nothing.num_bytes) == (None, 0)


def test_large_problem_is_hashed_once_for_all_of_its_answers():
    """If it were hashed for each answer, one request with 4096 answers would block the service for a minute."""
    large, texts = problem(1, cases="x" * 2**22), [str(number) for number in range(4096)]
    began = time.thread_time()
    assert len(set(keys_of("r", large, texts))) == len(texts)
    assert time.thread_time() - began < 2.0


def test_cache_key_of_a_verdict_depends_on_exactly_the_inputs_that_affect_the_verdict():
    given = problem(1, level=3)
    others = [
        replace(given, domain="other"),
        replace(given, ground_truth="2"),
        replace(given, metadata={"level": 4}),
        replace(given, messages=(Message("user", "say 2"),)),
        replace(given, messages=(Message("user", "say"), Message("user", " 1"))),
    ]
    keys = [key for each in (given, *others) for key in keys_of("r", each, ["text"])]
    keys += keys_of("r2", given, ["text"]) + keys_of("r", given, ["text ", "tex", ""])
    assert len(set(keys)) == len(keys)
    same = replace(given, problem_id="renamed", tags=("a=b",), metadata=dict(given.metadata))
    assert keys_of("r", same, ["", "text"])[1] == keys[0]


class Scripted:
    """A fake verifier that records the answers it is given, and waits while its gate is closed."""

    def __init__(self):
        self.answers = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.given_up = 0

    async def verify(self, problem, completion_text):
        self.answers.append(completion_text)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        if completion_text == "fail":
            return failed("so")
        if completion_text == "raise":
            raise ZeroDivisionError("of the verifier")
        return correct(completion_text) if completion_text == problem.ground_truth else wrong("no")


@pytest.fixture
def scripted():
    return Scripted()


@pytest.fixture
def serving(scripted):
    domains = {
        "kept": ServedDomain(verifier=PerAnswerVerifier(scripted), rules=RULES, kept=True),
        "words": ServedDomain(verifier=PerAnswerVerifier(scripted), rules=RULES, kept=False, tier="default"),
    }
    return service(domains, most_waiting=8)


@pytest.fixture
async def http(serving):
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
    transport = httpx.ASGITransport(create_app(serving, token=TOKEN))
    async with httpx.AsyncClient(transport=transport, base_url="http://verifier", headers=headers) as client:
        yield client


def request(*texts, domain="words", **changes):
    answers = tuple(SampledAnswer(text) for text in texts)
    fields = {"protocol": wire.PROTOCOL, "domain": domain, "rules": RULES, "problem": problem(1), "answers": answers}
    return msgspec.json.encode(VerifyRequest(**{**fields, **changes}))


async def outcomes(http, *texts, **changes):
    answer = await http.post(wire.VERIFY, content=request(*texts, **changes))
    assert answer.status_code == 200, answer.text
    judgements = msgspec.json.decode(answer.content, type=VerifyAnswer).judgements
    assert all(judgement.seconds >= 0 for judgement in judgements)
    return [judgement.verdict.outcome for judgement in judgements]


async def test_verifier_service_returns_a_verdict_for_every_answer_in_order(http, scripted):
    right, no = Outcome.CORRECT, Outcome.WRONG
    assert await outcomes(http, "1", "2", "1", "", "3") == [right, no, right, no, no]
    assert await outcomes(http, "1") == [right]
    assert scripted.answers == ["1", "2", "1", "", "3", "1"], "verdicts of this verifier are not cached"


async def test_exception_of_a_verifier_masks_the_answers_and_leaves_the_service_running(http):
    for domain in ("words", "kept"):
        assert await outcomes(http, "raise", domain=domain) == [Outcome.VERIFIER_ERROR]
        assert await outcomes(http, "1", domain=domain) == [Outcome.CORRECT]


async def test_verifier_service_judges_equal_answers_once_if_the_verifier_is_deterministic(http, scripted):
    right, no = Outcome.CORRECT, Outcome.WRONG
    assert await outcomes(http, "2", "1", "1", "2", domain="kept") == [no, right, right, no]
    assert await outcomes(http, "1", "3", domain="kept") == [right, no]
    assert scripted.answers == ["2", "1", "3"]
    assert await outcomes(http, "1", domain="kept", problem=problem(2)) == [no]
    assert await outcomes(http, "1 ", "11", "", domain="kept") == [no, no, no]
    assert scripted.answers[3:] == ["1", "1 ", "11", ""], "only equal answers to the same problem are cached"
    assert await outcomes(http, "fail", domain="kept") == await outcomes(http, "fail", domain="kept")
    assert scripted.answers.count("fail") == 2, "failures are not cached"
    status = msgspec.json.decode((await http.get(wire.STATUS)).content, type=ServiceStatus)
    assert (status.verdicts, status.hits, status.queue, status.state) == (12, 3, 0, "ready")
    assert status.cache_bytes > 0 and status.domains["words"].tier == "default"


@pytest.mark.parametrize(
    ("body", "status", "code", "words"),
    [
        (request("1", protocol=99), 409, OTHER_PROTOCOL, "protocol must be 1, got 99"),
        (request("1", domain="maths"), 404, wire.UNKNOWN_DOMAIN, "must be one of those judged here: kept, words"),
        (request("1", rules="r2"), 409, wire.OTHER_RULES, "by another recipe"),
        (request(), 422, "invalid_request_error", "length >= 1"),
        (request("1").replace(b'"answers"', b'"answer"'), 422, "invalid_request_error", "answers"),
        (b"[]", 422, "invalid_request_error", "object"),
        (b"{", 400, "invalid_json", "JSON"),
        (b'{"protocol": NaN}', 400, "invalid_json", "JSON"),
        (b'{"domain": "\xff"}', 400, "invalid_json", "JSON"),
        (b'{"x": ' + b"[" * 100_000, 400, "invalid_json", "JSON"),
    ],
)
async def test_verifier_service_rejects_invalid_requests_with_a_reason(http, scripted, body, status, code, words):
    answer = await http.post(wire.VERIFY, content=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code) and words in error["message"]
    assert scripted.answers == []


async def until(holds):
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.005)


async def test_verifier_service_that_is_full_or_draining_rejects_new_requests(http, serving, scripted):
    scripted.gate.clear()
    first = asyncio.create_task(outcomes(http, "1", "2", "3", "4", "5", "6"))
    await until(lambda: len(scripted.answers) == 6)
    full = await http.post(wire.VERIFY, content=request("1", "2", "3"))
    assert (full.status_code, full.json()["error"]["code"]) == (503, IS_FULL)
    assert (await http.post(wire.DRAIN)).json() == {"queue": 6}
    assert (await http.get(wire.HEALTH)).json() == {"state": "draining"}
    refused = await http.post(wire.VERIFY, content=request("1"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, wire.IS_DRAINING)
    assert serving.closing.is_set() and not serving.drained.is_set()
    scripted.gate.set()
    assert (await asyncio.wait_for(first, PATIENCE_S))[0] is Outcome.CORRECT
    assert serving.drained.is_set()


async def send_verify(app, leaves, sent):
    """Send a request to /verify by calling the application directly; disconnect as a client when `leaves` is set."""
    body = [{"type": "http.request", "body": request("1", "2"), "more_body": False}]

    async def receive():
        if body:
            return body.pop()
        await leaves.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    headers = [(b"authorization", b"Bearer secret"), (b"content-type", b"application/json"), (b"content-length", b"9")]
    scope = {
        "type": "http", "method": "POST", "path": wire.VERIFY, "raw_path": b"", "query_string": b"", "scheme": "http",
        "headers": headers, "http_version": "1.1", "root_path": "",
    }  # fmt: skip
    await asyncio.wait_for(app(scope, receive, send), PATIENCE_S)


def bodies(sent):
    return [message["body"] for message in sent if message["type"] == "http.response.body"]


async def test_verifier_service_cancels_the_work_of_a_disconnected_client(serving, scripted):
    scripted.gate.clear()
    leaves, sent = asyncio.Event(), list[dict[str, Any]]()
    asking = asyncio.create_task(send_verify(create_app(serving, token=TOKEN), leaves, sent))
    await until(lambda: len(scripted.answers) == 2)
    assert serving.status().queue == 2
    leaves.set()
    await asking
    assert (scripted.given_up, serving.status().queue, serving.status().verdicts) == (2, 0, 0)


async def test_verifier_service_sends_heartbeats_while_it_works(serving, scripted, monkeypatch):
    monkeypatch.setattr(http_service, "HEARTBEAT_S", 0.01)
    scripted.gate.clear()
    sent = list[dict[str, Any]]()
    asking = asyncio.create_task(send_verify(create_app(serving, token=TOKEN), asyncio.Event(), sent))
    await until(lambda: len(bodies(sent)) >= 3)
    scripted.gate.set()
    await asking
    *beats, last = bodies(sent)
    assert set(beats) == {b" "}
    assert len(msgspec.json.decode(b"".join(bodies(sent)), type=VerifyAnswer).judged) == 2 and last[:1] == b"{"
