"""Order in which a fair semaphore hands out its places."""

from __future__ import annotations

import asyncio
from collections import Counter

from pipelinerl.verifiers.fair_semaphore import FairSemaphore


async def waiting(
    places: FairSemaphore, groups: list[str], entered: asyncio.Queue[tuple[str, bool]]
) -> list[asyncio.Task[None]]:
    """Start tasks that wait for a place. Each reports to `entered` when it gets one, and whether out of turn."""

    async def enter(group: str) -> None:
        entered.put_nowait((group, await places.take(group)))

    tasks = [asyncio.create_task(enter(group)) for group in groups]
    while sum(map(len, places._waiting.values())) < len(groups):
        await asyncio.sleep(0)
    return tasks


async def test_groups_with_slow_questions_get_a_quarter_of_the_time_under_load() -> None:
    places, entered, held = FairSemaphore(2, Counter({"slow": 5})), asyncio.Queue[tuple[str, bool]](), Counter[str]()
    assert places.take_now() and places.take_now()
    tasks = await waiting(places, ["slow"] * 60 + [f"other {number}" for number in range(600)], entered)
    places.give_back(0.0, out_of_turn=False)
    for _ in range(400):
        group, out_of_turn = await entered.get()
        seconds = 0.05 if group == "slow" else 0.008
        held[group.split()[0]] += round(1000 * seconds)
        assert out_of_turn == (group == "slow")
        places.give_back(seconds, out_of_turn=out_of_turn)
    assert 0.2 < held["slow"] / held.total() < 0.3
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_one_place_in_four_is_given_out_of_turn() -> None:
    places, entered = FairSemaphore(4, Counter({"slow": 1})), asyncio.Queue[tuple[str, bool]]()
    assert all(places.take_now() for _ in range(4))
    tasks = await waiting(places, ["slow"] * 4 + ["other"] * 8, entered)
    for _ in range(8):
        places.give_back(1.0, out_of_turn=False)
    in_turn = [("other", False)] * 3
    assert [await entered.get() for _ in range(8)] == [*in_turn, ("slow", True), *in_turn, ("other", False)]
    places.give_back(0.1, out_of_turn=True)
    assert await entered.get() == ("slow", True)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_sole_waiter_is_in_turn_and_a_place_of_a_cancelled_waiter_is_freed() -> None:
    places, entered = FairSemaphore(1, Counter({"slow": 9})), asyncio.Queue[tuple[str, bool]]()
    assert places.take_now()
    (task,) = await waiting(places, ["slow"], entered)
    places.give_back(1.0, out_of_turn=False)
    task.cancel()  # the place had been handed over already
    await asyncio.gather(task, return_exceptions=True)
    assert places.take_now() and not places.take_now()
