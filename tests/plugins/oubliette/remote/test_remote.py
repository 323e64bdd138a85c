"""A remote sandbox, used over HTTP, gives the same verdicts as a local one; its failures are no verdicts on answers."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import msgspec
import pytest
from fastapi import FastAPI, Response

from pipelinerl.plugins.oubliette.checkers import CheckerFailed, CustomChecker, Protocol
from pipelinerl.plugins.oubliette.remote import wire
from pipelinerl.plugins.oubliette.remote.client import RemoteRunner
from pipelinerl.plugins.oubliette.remote.service import OublietteService, create_app
from pipelinerl.plugins.oubliette.repository import ContentMissing, Link, PersistentRepository, TransientRepository
from pipelinerl.plugins.oubliette.runner import Executed, LocalRunner, Program
from pipelinerl.plugins.oubliette.runs import Limits, SandboxLost, SandboxMissing, Tier
from pipelinerl.plugins.oubliette.sandbox import Sandbox, isolation_of
from pipelinerl.plugins.oubliette.section import OublietteSection
from pipelinerl.plugins.oubliette.verifier import Oubliette
from pipelinerl.system.service_client import IS_FULL, ServiceClient, ServicePatience
from pipelinerl.types import Outcome
from tests.fakes.problems import problem
from tests.fakes.served import in_thread
from tests.patience import PATIENCE_S, SOON_S

TOKEN, VARIABLE = "secret", "OUBLIETTE_TEST_KEY"
HASTY = ServicePatience(grace_s=0.0, silence_s=SOON_S, timeout_s=PATIENCE_S)
LIMITS = Limits(cpu_s=PATIENCE_S, wall_s=PATIENCE_S)
DOUBLES = [{"input": f"{n}\n", "output": f"{2 * n}\n"} for n in range(4)]
RIGHT = "print(2 * int(input()))"
IN_C = '#include <stdio.h>\nint main(void) { int n; return scanf("%d", &n) != 1 || printf("%d", 2 * n) < 0; }'


@pytest.fixture
def bodies(monkeypatch):
    sent, post = [], ServiceClient.post

    async def recorded(self, url, body, *rest, **options):
        sent.append(body)
        return await post(self, url, body, *rest, **options)

    monkeypatch.setattr(ServiceClient, "post", recorded)
    return sent


@pytest.fixture(scope="module")
def served(sandbox, tmp_path_factory):
    """Serve a real sandbox service that has its own sandbox; yield its URL and its repository."""
    persistent, transient = PersistentRepository(tmp_path_factory.mktemp("repository")), TransientRepository(64 << 20)
    own = Sandbox(lambda number: isolation_of(Tier.DEFAULT, number), at_once=2)
    runner = LocalRunner(own, tier="default", at_once=2, repository=persistent, outputs=transient)
    service = OublietteService(runner, tier=Tier.DEFAULT, persistent=persistent, transient=transient)
    with in_thread(create_app(service, token=TOKEN)) as url:
        yield url, persistent


@asynccontextmanager
async def runner_at(url):
    runner = await RemoteRunner.open(url, token=TOKEN, tier=Tier.DEFAULT, patience=HASTY)
    try:
        yield runner
    finally:
        await runner.close()


@pytest.fixture
async def verifier(served, monkeypatch):
    monkeypatch.setenv(VARIABLE, TOKEN)
    rules = OublietteSection(languages=("python", "c"), time_limit_s=PATIENCE_S, url=served[0], key_variable=VARIABLE)
    made = Oubliette(rules, deadline_s=PATIENCE_S)
    yield made
    await made.close()


async def judged(verifier, code, language="python", **metadata):
    return await verifier.verify(problem(**{"tests": DOUBLES} | metadata), f"```{language}\n{code}\n```")


async def test_remote_sandbox_gives_the_same_verdicts_as_a_local_sandbox_and_names_its_isolation_tier(verifier):
    for code, language, outcome, reason in (
        (RIGHT, "python", Outcome.CORRECT, "4 of 4 tests passed [remote default sandbox]"),
        (IN_C, "c", Outcome.CORRECT, "4 of 4 tests passed"),
        ("print(1 + int(input()))", "python", Outcome.WRONG, "test 1 of 4: wrote b'1\\n'"),
        ("1/0", "python", Outcome.WRONG, "ZeroDivisionError: division by zero"),
        ("int main(void) { return }", "c", Outcome.WRONG, "does not compile"),
    ):
        verdict = await judged(verifier, code, language)
        assert (verdict.outcome, verdict.reward) == (outcome, float(outcome is Outcome.CORRECT))
        assert reason in verdict.reason


async def test_requests_link_to_uploaded_test_cases_instead_of_repeating_them(served, verifier, bodies):
    """Requests contain links to inputs and outputs that are in the service's repository, and the program's source."""
    tests = []
    for word in (b"a-long-word-of-the-input " * 20, b"another-word-of-the-input " * 20):
        given, wanted = served[1].put(word), served[1].put(word[::-1])
        tests.append({"input": {"link": str(given)}, "output": {"link": str(wanted)}})
    verdict = await judged(verifier, "print(input()[::-1].strip())", tests=tests)
    assert verdict.outcome is Outcome.CORRECT, verdict.reason
    works = [msgspec.json.decode(body, type=wire.WorkRequest) for body in bodies]
    assert {each for work in works for each in work.contents} == {b"print(input()[::-1].strip())\n"}
    assert max(map(len, bodies)) < 2000
    lost = {"link": str(Link.of(b"never uploaded"))}
    verdict = await judged(verifier, RIGHT, tests=[{"input": lost, "output": lost}])
    assert verdict.outcome is Outcome.VERIFIER_ERROR
    assert "upload it" in verdict.reason


async def test_concurrent_runs_in_the_remote_sandbox_share_one_request_and_get_their_own_outputs(served, bodies):
    async with runner_at(served[0]) as runner:
        program = Program("python", b"print(int(input()) ** 2)")
        runs = await asyncio.gather(*(runner.run(program, b"%d\n" % n, LIMITS) for n in range(40)))
        assert len(bodies) == 1
        outputs = await asyncio.gather(*(runner.read(run.output) for run in runs))
    assert outputs == [b"%d\n" % (n * n) for n in range(40)]


CHECKER = CustomChecker(
    language="c",
    source='#include <stdio.h>\n#include "points.h"\nint main(int n, char **v) { FILE *f = fopen(v[2], "r"); int x = 0;'
    ' return fscanf(f, "%d", &x) != 1 ? 3 : x == 7 ? 0 : x == 4 ? (fprintf(stderr, "points 0.5"), POINTS) : 1; }',
    protocol=Protocol.TESTLIB,
    files=(("points.h", "#define POINTS 7\n"),),
)


async def test_custom_checker_is_compiled_once_and_then_sent_as_a_link(served, verifier):
    async with runner_at(served[0]) as runner:
        link = await runner.compile_checker(CHECKER)
        assert link in served[1]
        with pytest.raises(CheckerFailed, match="does not compile"):
            await runner.compile_checker(CustomChecker(language="c", source="no", protocol=Protocol.TESTLIB))
    own = {"checker": {"language": "c", "protocol": "testlib", "program": str(link)}}
    one = [{"input": "", "output": "x"}]
    assert (await judged(verifier, "print(7)", tests=one, **own)).outcome is Outcome.CORRECT
    assert (await judged(verifier, "print(8)", tests=one, **own)).outcome is Outcome.WRONG
    assert (await judged(verifier, "print('?')", tests=one, **own)).outcome is Outcome.VERIFIER_ERROR


async def test_answers_get_a_verifier_error_if_the_sandbox_service_is_unavailable(served, monkeypatch):
    with pytest.raises(SandboxMissing, match="rejects the token"):
        await RemoteRunner.open(served[0], token="other", tier=Tier.DEFAULT)
    with pytest.raises(SandboxLost, match=r"http://127\.0\.0\.1:9/status cannot be reached"):
        await RemoteRunner.open("http://127.0.0.1:9", token=None, tier=Tier.DEFAULT)
    monkeypatch.delenv(VARIABLE, raising=False)
    verifier = Oubliette(OublietteSection(url=served[0], key_variable=VARIABLE))
    verdict = await judged(verifier, RIGHT)
    assert verdict.outcome is Outcome.VERIFIER_ERROR
    assert f"names ${VARIABLE}, which is not set" in verdict.reason
    await verifier.close()


def _status(**changes):
    known = {"protocol": wire.PROTOCOL, "version": "0", "tier": "default", "languages": ["python"], "at_once": 1}
    return {**known, "queue": 0, "runs": 0, "transient_bytes": 0, **changes}


def _scripted(work, **changes):
    app = FastAPI()
    app.get(wire.STATUS)(lambda: _status(**changes))
    app.post(wire.WORK)(work)
    return app


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tier": "weak"}, "the default sandbox is required; .* has the weak one"),
        ({"protocol": 99}, "speaks protocol 99"),
        ({"languages": 3}, "is not an Oubliette service"),
    ],
)
async def test_sandbox_service_with_another_protocol_or_a_weaker_isolation_tier_is_rejected(changes, reason):
    with in_thread(_scripted(lambda: {"done": []}, **changes)) as url, pytest.raises(SandboxMissing, match=reason):
        await RemoteRunner.open(url, token=None, tier=Tier.DEFAULT)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"done": []}, "answered 0 of 1"),
        ("no", "is not an Oubliette service"),
        ({"done": [{"type": "checked", "share": 7}]}, "is not an Oubliette service"),
        ({"done": [{"type": "checked", "share": 1}]}, "answered Checked, which was not requested"),
        ({"done": [{"type": "not_done", "cause": "lost", "why": "a guest"}]}, "a guest"),
        (Response("x" * (1 << 20)), "sends more than"),
        (Response("{}", status_code=500), "refuses .500."),
        (Response("{}", status_code=400), "refuses .400."),
    ],
)
async def test_invalid_responses_of_a_sandbox_service_are_rejected(answer, reason):
    with in_thread(_scripted(lambda: answer)) as url:
        async with runner_at(url) as runner:
            with pytest.raises(SandboxLost, match=reason):
                await runner.run(Program("python", b""), b"", LIMITS)


async def test_request_to_a_full_sandbox_service_is_retried():
    full, requests = {"error": {"message": "full", "code": IS_FULL}}, list[int]()
    ended = {"type": "ended", "ending": "exited", "code": 0, "output": str(Link.of(b"")), "head": "", "stderr": "",
             "cpu_s": 0, "wall_s": 0, "tier": "default"}  # fmt: skip

    def work() -> Response:
        requests.append(1)
        return Response(json.dumps(full), 503) if len(requests) < 3 else Response(json.dumps({"done": [ended]}))

    with in_thread(_scripted(work)) as url:
        async with runner_at(url) as runner:
            executed = await runner.run(Program("python", b""), b"", LIMITS)
    assert isinstance(executed, Executed) and len(requests) == 3


async def test_closing_the_connection_to_a_remote_sandbox_fails_its_waiting_calls():
    gate, loop = asyncio.Event(), asyncio.get_running_loop()

    async def work() -> None:
        loop.call_soon_threadsafe(gate.set)
        await asyncio.sleep(PATIENCE_S)

    with in_thread(_scripted(work)) as url:
        runner = await RemoteRunner.open(url, token=None, tier=Tier.DEFAULT)
        waiting = asyncio.create_task(runner.run(Program("python", b""), b"", LIMITS))
        await asyncio.wait_for(gate.wait(), PATIENCE_S)
        await runner.close()
        with pytest.raises(SandboxLost, match="closed"):
            await waiting


async def test_data_uploaded_to_a_sandbox_service_can_be_read_back_by_its_link(served):
    data = bytes(range(256)) * 1000
    async with runner_at(served[0]) as runner:
        link = Link.of(data)
        assert await runner.missing([link]) == {link}
        assert await runner.upload(data) == link
        assert await runner.missing([link]) == set()
        assert await runner.read(link) == data
        with pytest.raises(ContentMissing):
            await runner.read(Link.of(b"never"))


async def test_sandbox_service_rejects_invalid_requests(served):
    work = {"type": "run", "language": "python", "program": "oub:x", "input": "", "limits": {}}
    nothing = {**work, "limits": {"cpu_s": "much"}}
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(base_url=served[0], headers=headers, trust_env=False, timeout=PATIENCE_S) as http:
        for body, status in (
            ({"protocol": 99, "works": [work]}, 409),
            ({"protocol": 1, "works": []}, 422),
            ({"protocol": 1, "works": [nothing]}, 422),
            ({"protocol": 1, "works": [{"type": "shell"}]}, 422),
        ):
            assert (await http.post(wire.WORK, json=body)).status_code == status
        unknown = {**work, "language": "cobol", "program": str(Link.of(b"")), "input": str(Link.of(b""))}
        done = (await http.post(wire.WORK, json={"protocol": 1, "contents": [""], "works": [work, unknown]})).json()
        assert [(each["type"], each["cause"]) for each in done["done"]] == [
            ("not_done", wire.NO_CONTENT), ("not_done", wire.NO_TOOLCHAIN)
        ]  # fmt: skip
        assert (await http.post(wire.MISSING, json={"links": ["x"]})).status_code == 422
        assert (await http.get(wire.CONTENT, params={"link": "../../etc/passwd"})).status_code == 404


async def test_linked_test_cases_are_read_from_the_repository_that_the_recipe_names(sandbox, tmp_path):
    repository = PersistentRepository(tmp_path)
    test = {"input": {"link": str(repository.put(b"21\n"))}, "output": {"link": str(repository.put(b"42\n"))}}
    for folder, reason in (
        (str(tmp_path), "1 of 1 tests passed [default sandbox]"),
        ("", "set oubliette.repository to its folder"),
    ):
        rules = OublietteSection(time_limit_s=PATIENCE_S, repository=folder)
        verifier = Oubliette(rules, deadline_s=PATIENCE_S, workers=1)
        assert reason in (await judged(verifier, RIGHT, tests=[test])).reason
        await verifier.close()
