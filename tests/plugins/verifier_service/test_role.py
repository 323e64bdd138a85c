"""The process of a verifier service: its lease at the controller, the digest of its judging rules, and its exit."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import httpx
import pytest
from fastapi import FastAPI, Request

from pipelinerl.config.domains import DomainSection
from pipelinerl.config.recipe import load
from pipelinerl.controller.routes import VerifierLease
from pipelinerl.errors import RecipeError
from pipelinerl.plugins.oubliette import probe
from pipelinerl.plugins.oubliette.runs import SandboxMissing
from pipelinerl.plugins.verifier_service import server as verifier_role
from pipelinerl.plugins.verifier_service.client import VerifierServices
from pipelinerl.plugins.verifier_service.server import served_domain
from pipelinerl.roles.process import Identity
from pipelinerl.roles.verification import rules_of
from pipelinerl.system.http_service import guard
from pipelinerl.types import Outcome
from pipelinerl.verifiers.verifier import SampledAnswer
from tests.fakes.served import in_thread
from tests.fakes.verifier_service import problem
from tests.patience import PATIENCE_S

TOKEN = "secret"
REWARDS = "def reward(completion, answer):\n    return completion == answer\n"


def identity(directory, controller_url, *, verifier=None, **rest):
    (directory / "rewards.py").write_text(REWARDS)
    config = load("tiny", ["run.name=test"])
    section = DomainSection(name="words", source="addition", verifier=verifier or f"{directory}/rewards.py:reward")
    return Identity(
        config=config.model_copy(update={"domains": (section,)} | rest),
        run_dir=directory,
        name="verifier-0",
        redis_url="",
        controller_url=controller_url,
        token=TOKEN,
    )


class Controller:
    def __init__(self):
        self.leases: dict[str, VerifierLease] = {}
        app = self.app = FastAPI(openapi_url=None)

        @app.post("/verifiers")
        async def offer(request: Request) -> dict[str, str]:
            lease = VerifierLease(**await request.json())
            self.leases[lease.url] = lease
            return {"state": "leased"}

        @app.delete("/verifiers")
        async def withdraw(url: str) -> dict[str, str]:
            del self.leases[url]
            return {"state": "removed"}

        guard(app, token=TOKEN)


@asynccontextmanager
async def serving(directory):
    """Run the role of a verifier service; yield its controller, its recipe's domain, its lease and its task."""
    controller = Controller()
    with in_thread(controller.app) as url:
        made = identity(directory, url)
        role = asyncio.create_task(verifier_role.run(made))
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not controller.leases:
                    assert not role.done(), role
                    await asyncio.sleep(0.02)
            yield controller, made.config.domains[0], next(iter(controller.leases.values())), role
        finally:
            role.cancel()
            await asyncio.gather(role, return_exceptions=True)


async def test_verifier_service_registers_at_the_controller_judges_answers_and_unregisters_when_drained(tmp_path):
    async with serving(tmp_path) as (controller, domain, lease, role):
        assert lease.domains == {"words": rules_of(domain)}
        services = VerifierServices(token=TOKEN)
        services.update([lease])
        judged = await services.judge("words", rules_of(domain), problem(1), [SampledAnswer("1"), SampledAnswer("2")])
        await services.close()
        assert [judgement.verdict.outcome for judgement in judged] == [Outcome.CORRECT, Outcome.WRONG]
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {TOKEN}"}, trust_env=False) as http:
            assert (await http.post(f"{lease.url}/drain")).json() == {"queue": 0}
        await asyncio.wait_for(role, PATIENCE_S)  # the drained process ends by itself, without an error
        assert controller.leases == {}


async def test_verifier_service_that_is_stopped_unregisters_from_the_controller(tmp_path):
    async with serving(tmp_path) as (controller, _, _, role):
        role.cancel()
        await asyncio.wait({role}, timeout=PATIENCE_S)
        assert role.done() and controller.leases == {}


async def test_verifier_service_does_not_start_if_the_sandbox_it_requires_is_missing(tmp_path, monkeypatch):
    def missing(*_, **__):
        raise SandboxMissing("there is no bubblewrap here")

    monkeypatch.setattr(probe, "opened", missing)
    with pytest.raises(RecipeError, match=r"domains\.words\.oubliette\.tier: there is no bubblewrap here"):
        await verifier_role.run(identity(tmp_path, "", verifier="oubliette"))


async def test_verifier_service_rejects_a_domain_that_the_recipe_lacks(tmp_path):
    with pytest.raises(RecipeError, match="--domain must be one of words; got maths"):
        await verifier_role.run(identity(tmp_path, ""), only=["maths"])


def test_digest_of_a_verifiers_rules_changes_only_with_settings_that_affect_verdicts(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    for directory in (here, there):
        directory.mkdir()
    section, elsewhere = (identity(each, "").config.domains[0] for each in (here, there))
    assert rules_of(section) == rules_of(elsewhere), "one file in two places"
    same = {"weight": 3.0, "max_tokens": 7, "verifier_workers": 9, "system_prompt": "be brief"}
    assert rules_of(section.model_copy(update=same)) == rules_of(section)
    others = [section.model_copy(update=change) for change in ({"correct_at": 0.5}, {"verifier": "math_answer"})]
    (there / "rewards.py").write_text(REWARDS.replace("==", "!="))
    assert len({rules_of(each) for each in (section, elsewhere, *others)}) == 4


@pytest.mark.parametrize(
    ("verifier", "kept"), [("math_answer", True), ("instruction_following", True), ("oubliette", True), (None, False)]
)
async def test_only_verdicts_of_deterministic_verifiers_are_cached(tmp_path, verifier, kept):
    (section,) = identity(tmp_path, "", verifier=verifier).config.domains
    served = served_domain(section)
    await served.verifier.close()
    assert served.kept is kept
