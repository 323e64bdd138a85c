"""The client of verifier services gets verdicts from any live service, and reports a verifier error if none works."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace

import msgspec
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse, Response, StreamingResponse

from pipelinerl.plugins.verifier_service import wire
from pipelinerl.plugins.verifier_service.client import RemoteVerifier, VerifierServices
from pipelinerl.plugins.verifier_service.server import create_app
from pipelinerl.plugins.verifier_service.wire import ServedDomain, VerifyRequest
from pipelinerl.system.http_service import guard
from pipelinerl.system.service_client import ServicePatience
from pipelinerl.types import Outcome
from pipelinerl.verifiers.verifier import PerAnswerVerifier, SampledAnswer, correct, wrong
from tests.fakes.served import in_thread
from tests.fakes.verifier_service import RULES, TOKEN, lease, problem, service
from tests.patience import PATIENCE_S, SOON_S

ANSWERS = tuple(SampledAnswer(text) for text in ("1", "2", "1"))
RIGHT = [Outcome.CORRECT, Outcome.WRONG, Outcome.CORRECT]


class Exact:
    def __init__(self):
        self.judged = 0

    async def verify(self, problem, completion_text):
        self.judged += 1
        return correct(completion_text) if completion_text == problem.ground_truth else wrong("no")


def honest(verifier):
    served = ServedDomain(verifier=PerAnswerVerifier(verifier), rules=RULES, kept=False)
    return create_app(service({"words": served}), token=TOKEN)


@asynccontextmanager
async def serving(*apps, grace_s=PATIENCE_S, silence_s=SOON_S):
    """Serve the applications; yield a client that knows none of them yet, and a lease of each."""
    services = VerifierServices(token=TOKEN, patience=ServicePatience(grace_s=grace_s, silence_s=silence_s))
    with ExitStack() as stack:
        leases = [lease(stack.enter_context(in_thread(app))) for app in apps]
        try:
            yield services, leases
        finally:
            await services.close()


async def outcomes(services, number=1, rules=RULES):
    verifier = RemoteVerifier(services, domain="words", rules=rules)
    answers = [answer._replace(text=str(number) if answer.text == "1" else "no") for answer in ANSWERS]
    judged = await asyncio.wait_for(verifier.judge(problem(number), answers), PATIENCE_S)
    return [judgement.verdict.outcome for judgement in judged]


class Hostile:
    """A server with one answer, which may be no verdicts; it keeps the requests and sets the event `contacted`."""

    def __init__(self, answer):
        self.contacted = threading.Event()
        self.bodies = []
        self.app = FastAPI(openapi_url=None)

        @self.app.post(wire.VERIFY)
        async def verify(request: Request) -> Response:
            self.bodies.append(await request.body())
            self.contacted.set()
            return answer()

        guard(self.app, token=TOKEN)


def responding(*rewards, outcome="correct", **fields):
    judged = [{"verdict": {"outcome": outcome, "reward": reward, **fields}, "seconds": 0.0} for reward in rewards]
    return lambda: Response(msgspec.json.encode({"judged": judged}), media_type="application/json")


def raw(content, status=200):
    return lambda: Response(content, status, media_type="application/json")


async def endless():
    for _ in range(64):  # more than a client accepts; not endless, because a server writes on after a disconnect
        yield b" " * (1 << 20)
        await asyncio.sleep(0)


async def mute():
    yield b" "
    await asyncio.sleep(PATIENCE_S)


async def broken_off():
    yield b'{"judged": ['
    raise ConnectionResetError("on purpose")


HOSTILE = {
    "no text": raw(b'{"judged": "\xff"}'),
    "endless nested brackets": raw(b'{"x": ' + b"[" * 100_000),
    "too few verdicts": responding(1.0, 1.0),
    "too many verdicts": responding(1.0, 1.0, 1.0, 1.0),
    "no verdicts": responding(),
    "a reward of null": responding(1.0, None, 1.0),
    "a reward that is a text": responding(1.0, "1", 1.0),
    "a reward of NaN": raw(responding(7.5, 1.0, 1.0)().body.replace(b"7.5", b"NaN")),
    "an infinite reward": raw(responding(7.5, 1.0, 1.0)().body.replace(b"7.5", b"1e999")),
    "a huge reward": responding(1.0, 1e300, 1.0),
    "a huge reward part": responding(1.0, 1.0, 1.0, parts=[["a", -1e300]]),
    "an unknown outcome": responding(1.0, 1.0, 1.0, outcome="splendid"),
    "no JSON": raw(b"<html>"),
    "an empty body": raw(b""),
    "a body that is far too long": lambda: StreamingResponse(endless()),
    "a body that breaks off": lambda: StreamingResponse(broken_off()),
    "a failure": raw(b"Internal Server Error", 500),
    "a refusal of the token": raw(b'{"error": {"message": "no", "code": "unauthorized"}}', 401),
    "another recipe": raw(b'{"error": {"message": "no", "code": "other_rules"}}', 409),
    "silence after the head": lambda: StreamingResponse(mute()),
    "a redirect": lambda: RedirectResponse("http://127.0.0.1:1/verify"),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_answers_are_sent_to_another_verifier_service_if_the_first_responds_invalidly(name):
    verifier, hostile = Exact(), Hostile(HOSTILE[name])
    silence_s = 1.0 if name == "silence after the head" else SOON_S
    async with serving(hostile.app, honest(verifier), silence_s=silence_s) as (services, leases):
        services.update(leases[:1])
        asking = asyncio.create_task(outcomes(services))
        assert await asyncio.to_thread(hostile.contacted.wait, PATIENCE_S)
        services.update(leases)
        assert await asking == RIGHT
    assert verifier.judged == len(ANSWERS), "each answer was judged once"


NOBODY = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("answer", "named", "words"),
    [
        (raw(b"oops", 500), {}, "refuses (500): oops"),
        (responding(1.0), {}, "gave 1 verdicts on 3 answers"),
        (None, {}, "cannot be reached"),
        (None, None, "no verifier service of this run judges words now"),
        (None, {"domains": ("maths",)}, "no verifier service of this run judges words now"),
        (None, {"rules": "r2"}, "by another recipe than this actor's"),
    ],
)
async def test_answers_get_a_verifier_error_with_the_reason_if_no_verifier_service_can_judge_them(answer, named, words):
    async with serving(Hostile(answer or raw(b"")).app, grace_s=0.6) as (services, (known,)):
        services.update([] if named is None else [known if answer else lease(NOBODY, **named)])
        judged = await services.judge("words", RULES, problem(1), ANSWERS)
    assert [judgement.verdict.outcome for judgement in judged] == [Outcome.VERIFIER_ERROR] * 3
    assert all(words in judgement.verdict.reason for judgement in judged), judged


async def test_answers_get_a_verifier_error_without_retries_if_every_verifier_service_rejects_the_request():
    refusal = raw(b'{"error": {"message": "too odd", "code": "x"}}', 422)
    async with serving(Hostile(refusal).app) as (services, leases):
        services.update(leases)
        unsent = replace(problem(1), metadata={"a": object()})
        for given, words in ((problem(1), "too odd"), (unsent, "cannot be sent")):
            (judgement, *_) = await asyncio.wait_for(services.judge("words", RULES, given, ANSWERS), SOON_S)
            assert words in judgement.verdict.reason


async def test_answers_wait_to_be_judged_until_a_verifier_service_joins_and_has_capacity():
    refusals = [raw(b'{"error": {"message": "full", "code": "full"}}', 503)] * 3
    app = honest(Exact())

    async def full_at_first(scope, receive, send):
        if scope["type"] == "http" and refusals:
            await refusals.pop()()(scope, receive, send)
        else:
            await app(scope, receive, send)

    async with serving(full_at_first) as (services, leases):
        asking = asyncio.create_task(outcomes(services))
        await asyncio.sleep(0)
        services.update(leases)
        assert await asking == RIGHT
    assert refusals == []


async def test_each_problem_has_a_preferred_verifier_service_and_problems_are_spread_over_all_services():
    verifiers = [Exact(), Exact()]
    async with serving(*map(honest, verifiers)) as (services, leases):
        services.update(leases)
        for _ in range(4):
            assert await outcomes(services, 1) == RIGHT
        assert sorted(verifier.judged for verifier in verifiers) == [0, 4 * len(ANSWERS)]
        for number in range(2, 34):  # the probability that all of them prefer the same service is 2⁻³¹
            await outcomes(services, number)
    assert all(verifier.judged > len(ANSWERS) for verifier in verifiers)


async def test_verifier_service_with_many_more_waiting_answers_than_others_gets_no_further_ones():
    gate = threading.Event()

    class Held(Exact):
        async def verify(self, problem, completion_text):
            await asyncio.to_thread(gate.wait, PATIENCE_S)
            return await super().verify(problem, completion_text)

    free, many = Exact(), [SampledAnswer("1")] * 100
    async with serving(honest(Held()), honest(free)) as (services, leases):
        services.update(leases[:1])
        first = [asyncio.create_task(services.judge("words", RULES, problem(n), many)) for n in range(3)]
        await asyncio.sleep(0)
        services.update(leases)
        for number in range(8):
            assert await outcomes(services, number) == RIGHT
        assert free.judged == 8 * len(ANSWERS)
        gate.set()
        assert [len(judged) for judged in await asyncio.wait_for(asyncio.gather(*first), PATIENCE_S)] == [100] * 3


async def test_request_to_a_verifier_service_states_its_protocol_version_and_the_digest_of_the_rules():
    server = Hostile(responding(1.0, 0.0, 0.5, outcome="partial"))
    given = problem(1, tests=[{"input": "", "output": "é"}])
    answers = (SampledAnswer("a\x00", (1, 2), "length"), *ANSWERS[1:])
    async with serving(server.app) as (services, leases):
        services.update(leases)
        judged = await services.judge("words", RULES, given, answers)
    sent = VerifyRequest(protocol=1, domain="words", rules=RULES, problem=given, answers=answers)
    assert server.bodies == [msgspec.json.encode(sent)]
    assert [(j.verdict.outcome, j.verdict.reward) for j in judged] == [
        (Outcome.PARTIAL, each) for each in (1.0, 0.0, 0.5)
    ]
