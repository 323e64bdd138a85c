"""The cache of verdicts: keyed by all inputs, bounded in bytes, without failures."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from pipelinerl.types import Message, Outcome, RewardPart, Verdict
from pipelinerl.verifiers.service.verdict_cache import VerdictCache, keys_of
from pipelinerl.verifiers.verifier import correct, failed, timed_out, wrong
from tests.fakes.verifier_service import problem


def test_cached_verdict_round_trips() -> None:
    cache = VerdictCache(1 << 16)
    verdict = Verdict(outcome=Outcome.PARTIAL, reward=0.1, reason="größer", answer="x", parts=(RewardPart("a", 0.25),))
    cache.keep(b"k", verdict)
    assert cache.find(b"k") == verdict
    assert cache.find(b"other") is None


@pytest.mark.parametrize("verdict", [failed("away"), timed_out(1.0)])
def test_failures_of_the_verifier_are_not_cached(verdict: Verdict) -> None:
    cache = VerdictCache(1 << 16)
    cache.keep(b"k", verdict)
    assert cache.find(b"k") is None and cache.num_bytes == 0


def test_size_of_the_cache_is_bounded_and_the_least_recently_used_entry_is_evicted() -> None:
    cache = VerdictCache(4000)
    for number in range(100):
        cache.keep(b"first", correct("1"))  # storing the same entry again does not count its size again
        cache.keep(b"%d" % number, wrong("x" * (number % 50)))
        assert cache.find(b"first") is not None
        assert cache.num_bytes <= 4000
    kept = [number for number in range(100) if cache.find(b"%d" % number) is not None]
    assert kept == list(range(kept[0], 100)) and 5 < len(kept) < 16
    nothing = VerdictCache(0)
    nothing.keep(b"k", correct("1"))
    assert (nothing.find(b"k"), nothing.num_bytes) == (None, 0)


def test_large_problem_is_hashed_once_for_all_answers() -> None:
    """Four thousand answers to a problem of 16 MB in one request once blocked the service for a minute."""
    large, texts = problem(1, cases="x" * 2**22), [str(number) for number in range(4096)]
    began = time.thread_time()
    assert len(set(keys_of("r", large, texts))) == len(texts)
    assert time.thread_time() - began < 2.0


def test_key_covers_exactly_the_inputs_of_a_verdict() -> None:
    asked = problem(1, level=3)
    others = [
        replace(asked, domain="other"),
        replace(asked, ground_truth="2"),
        replace(asked, metadata={"level": 4}),
        replace(asked, messages=(Message("user", "say 2"),)),
        replace(asked, messages=(Message("user", "say"), Message("user", " 1"))),
    ]
    keys = [key for each in (asked, *others) for key in keys_of("r", each, ["text"])]
    keys += keys_of("r2", asked, ["text"]) + keys_of("r", asked, ["text ", "tex", ""])
    assert len(set(keys)) == len(keys)
    same = replace(asked, problem_id="renamed", tags=("a=b",), metadata=dict(asked.metadata))
    assert keys_of("r", same, ["", "text"])[1] == keys[0]
