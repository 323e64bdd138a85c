"""Tests of `Grace`: who counts as late in a publication, and after how long."""

import asyncio

import pytest

from pipelinerl.errors import EngineUnreachable
from pipelinerl.weights import grace as module
from pipelinerl.weights.grace import Grace, floor_s

FLOOR_S = 0.05


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(module, "_LONGEST_FLOOR_S", FLOOR_S)
    monkeypatch.setattr(module, "_SHORTEST_FLOOR_S", FLOOR_S)


def known(*urls, seconds=0.001):
    made = Grace()
    for url in urls:
        made.note("COMMIT", url, seconds)
    return made


async def answered(made, **delays):
    async def call(url):
        await asyncio.sleep(delays[url])
        return url

    return dict(await made.each("COMMIT", delays, call, engines=len(delays)))


async def test_no_engine_is_late_before_another_one_has_answered():
    assert await answered(known("a", "b"), a=6 * FLOOR_S, b=6 * FLOOR_S) == {"a": "a", "b": "b"}


async def test_engine_is_late_if_those_that_follow_announcements_have_answered_before():
    async def frozen(url):
        await asyncio.sleep(60.0)

    results = await known("a").each("COMMIT", ["a"], frozen, engines=2, others=True)
    assert isinstance(results["a"], EngineUnreachable)


async def test_engine_without_history_and_a_fleets_only_engine_are_never_late():
    assert await answered(known("a"), a=0.0, b=6 * FLOOR_S) == {"a": "a", "b": "b"}
    assert await answered(known("a"), a=6 * FLOOR_S) == {"a": "a"}


def test_grace_is_three_times_the_usual_time_and_triples_after_a_late_answer():
    made = known("a", seconds=1.0)
    assert made.of("COMMIT", ["a"], engines=2, most_s=40.0) == 3.0
    made.was_late("COMMIT", "a", 3.0)
    assert made.of("COMMIT", ["a"], engines=2, most_s=40.0) == 9.0
    assert made.of("COMMIT", ["a", "b"], engines=2, most_s=40.0) == 40.0, "b has no history"
    made.forget("a")
    assert made.of("COMMIT", ["a"], engines=2, most_s=40.0) == 40.0, "a new process at the address of a"


def test_shortest_grace_falls_with_the_number_of_engines(monkeypatch):
    monkeypatch.undo()
    assert [floor_s(engines) for engines in (1, 2, 4, 8, 100)] == [2.0, 2.0, 1.0, 0.5, 0.5]
