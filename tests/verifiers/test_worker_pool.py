"""The pool of verifier worker processes: deadlines, priorities, dying workers, and cleanup after the actor's death."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
import tracemalloc
import warnings
from collections import Counter
from pathlib import Path

import pytest

from pipelinerl.verifiers import worker_pool
from pipelinerl.verifiers.worker_pool import FairSemaphore, WorkerLost, WorkerPool
from tests.patience import PATIENCE_S, is_running, wait_until

SLEEPER = f"{Path(__file__).with_name('slow_worker.py')}:open_sleeper"
linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are tied and forked on Linux")


@pytest.fixture
async def pool():
    made = []

    def make(workers=2, deadline_s=PATIENCE_S, argument=""):
        made.append(WorkerPool(SLEEPER, argument, workers=workers, deadline_s=deadline_s))
        return made[-1]

    yield make
    for each in made:
        await each.close()


async def test_second_verifier_worker_starts_only_while_the_first_is_busy(pool):
    one = pool()
    await asyncio.gather(one.start(), one.ask("who"))
    alone = [(await one.ask("who"))[0] for _ in range(3)]
    assert len(set(alone)) == 1 and len(one._forkers) == 1
    both = await asyncio.gather(one.ask(["sleep", 0.2]), one.ask(["sleep", 0.2]))
    assert len({pid for pid, _ in both}) == 2 and alone[0] in {pid for pid, _ in both}


async def test_requests_of_any_size_to_verifier_workers_get_their_own_answers(pool):
    sizes = [0, 1, 70_000, 10**6, 3]
    one = pool()
    assert [len(answer) for answer in await asyncio.gather(*(one.ask(["long", size]) for size in sizes))] == sizes
    assert await one.ask(["x" * 10**6, "\ud800\x00\u202e"]) is not None


async def test_worker_requests_are_encoded_only_when_they_are_sent(pool):
    """If all waiting requests were encoded, a thousand answers to a problem of megabytes would need gigabytes."""
    one, large = pool(workers=2), "x" * 2**20
    await one.start()
    tracemalloc.start()
    try:
        await asyncio.gather(*(one.ask([large, number]) for number in range(64)))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 32 * 2**20


async def test_worker_of_a_slow_request_gets_a_low_priority(pool):
    one, own = pool(workers=1), os.getpriority(os.PRIO_PROCESS, 0)
    assert (await one.ask("who"))[1] == own
    assert (await one.ask(["spin", 0.3]))[1] == max(own, 10)
    assert (await one.ask("who"))[1] == own
    usual = [await one.ask(["spin", 0.15]) for _ in range(6)]
    assert [priority for _, priority in usual[-3:]] == [own] * 3, "a duration that has become usual is not slow"


@linux
async def test_request_whose_worker_gets_no_cpu_does_not_count_as_slow(pool):
    one, own = pool(workers=1), os.getpriority(os.PRIO_PROCESS, 0)
    pid, _ = await one.ask("who")
    os.kill(pid, signal.SIGSTOP)
    request = asyncio.create_task(one.ask("who"))
    await asyncio.sleep(0.4)
    os.kill(pid, signal.SIGCONT)
    assert await request == [pid, own]


async def test_many_hanging_requests_time_out_without_blocking_other_requests(pool, monkeypatch):
    monkeypatch.setattr(worker_pool, "_LEAST_SLOW_S", 0.1)
    one = pool(workers=2)
    await one.ask("who")
    hanging = [asyncio.create_task(one.ask(["sleep", 600], group="bad")) for _ in range(12)]
    await asyncio.sleep(0.01)
    good = [asyncio.create_task(one.ask("who", group="good")) for _ in range(8)]
    await asyncio.gather(*good)
    assert not any(each.done() for each in hanging), "no request has reached its deadline"
    for each in hanging:
        each.cancel()
    one = pool(workers=2, deadline_s=0.5)
    hanging = [asyncio.create_task(one.ask(["sleep", 600], group="bad")) for _ in range(12)]
    results = await asyncio.gather(*hanging, return_exceptions=True)
    assert all(isinstance(each, TimeoutError) for each in results)


async def test_worker_pool_prefers_requests_of_groups_that_had_no_slow_requests(pool, monkeypatch):
    monkeypatch.setattr(worker_pool, "_LEAST_SLOW_S", 0.3)
    one = pool(workers=1)
    order = []

    async def ask(group, seconds):
        await one.ask(["sleep", seconds], group=group)
        order.append(group)

    await ask("slow", 0.6)
    busy = asyncio.create_task(ask("busy", 0.2))
    await asyncio.sleep(0.05)
    await asyncio.gather(ask("slow", 0.0), ask("other", 0.0), busy)
    assert order == ["slow", "busy", "other", "slow"]


async def test_verifier_worker_that_was_killed_while_idle_is_replaced(pool):
    one = pool()
    pid, _ = await one.ask("who")
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert (await one.ask("who"))[0] != pid


@linux
@pytest.mark.parametrize("argument", ["", "threads"])
async def test_dead_verifier_workers_leave_no_open_file_descriptor(pool, argument):
    one = pool(argument=argument)

    async def dies():
        with pytest.raises(WorkerLost, match="ended with status 1 before"):
            await one.ask("die")
        await one.ask("who")
        return len(os.listdir("/proc/self/fd"))

    open_files = [await dies() for _ in range(4)]
    assert max(open_files[1:]) <= open_files[0]


@linux
async def test_cancelled_start_of_a_verifier_worker_leaves_no_open_socket(pool):
    """The start is cancelled at several points; pytest would report an open socket as a warning in a later test."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        for turns in (1, 2, 4):
            starting = asyncio.create_task(pool().start())
            for _ in range(turns):
                await asyncio.sleep(0)
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        gc.collect()
    assert [str(warning.message) for warning in caught] == []


async def test_workers_answer_to_a_cancelled_request_is_not_given_to_the_next_request(pool):
    one = pool(workers=1)
    await one.ask("who")
    given_up = asyncio.create_task(one.ask(["sleep", 0.2]))
    waiting = asyncio.create_task(one.ask("who"))
    await asyncio.sleep(0.05)
    waiting.cancel()
    given_up.cancel()
    await asyncio.gather(given_up, waiting, return_exceptions=True)
    assert await one.ask(["long", 3]) == "xxx"


async def test_every_request_fails_if_the_worker_function_cannot_be_loaded(pool):
    one = pool(argument="broken")
    await one.start()
    for _ in range(2):
        with pytest.raises(WorkerLost, match="did not start"):
            await one.ask("who")
    missing = WorkerPool("/nope/r.py:f", deadline_s=1.0)
    with pytest.raises(WorkerLost, match=r"/nope/r.py does not exist"):
        await missing.ask("who")
    await missing.close()


ACTOR = """
import asyncio, sys
from pipelinerl.verifiers import worker_pool
from pipelinerl.verifiers.worker_pool import WorkerPool
async def main():
    pool = WorkerPool(sys.argv[1], workers=2, deadline_s=600.0)
    pids = [pid for pid, _ in await asyncio.gather(pool.ask(["sleep", 0.2]), pool.ask(["sleep", 0.2]))]
    print(*pids, pool._forkers[0]._child.pid, flush=True)
    await asyncio.gather(pool.ask(["spin", 600]), pool.ask(["sleep", 600]))
asyncio.run(main())
"""


@linux
def test_verifier_workers_end_when_their_actor_process_is_killed():
    actor = subprocess.Popen([sys.executable, "-c", ACTOR, SLEEPER], stdout=subprocess.PIPE, text=True)
    assert actor.stdout is not None
    pids = [int(word) for word in actor.stdout.readline().split()]
    assert len(pids) == 3 and all(map(is_running, pids))
    time.sleep(0.5)
    actor.kill()
    actor.wait(timeout=PATIENCE_S)
    actor.stdout.close()
    wait_until(lambda: not any(map(is_running, pids)), "all workers have ended")


async def waiting(places, groups, entered):
    """Start a task per group that waits for a slot, then puts (group, whether it was out of turn) into `entered`."""

    async def enter(group):
        entered.put_nowait((group, await places.take(group)))

    tasks = [asyncio.create_task(enter(group)) for group in groups]
    while sum(map(len, places._waiting.values())) < len(groups):
        await asyncio.sleep(0)
    return tasks


async def test_groups_with_slow_requests_get_a_quarter_of_the_worker_time_if_all_workers_are_busy():
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


async def test_every_fourth_free_worker_slot_is_given_to_a_group_with_slow_requests():
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


async def test_worker_slot_given_to_a_request_that_is_then_cancelled_is_freed():
    places, entered = FairSemaphore(1, Counter({"slow": 9})), asyncio.Queue[tuple[str, bool]]()
    assert places.take_now()
    (task,) = await waiting(places, ["slow"], entered)
    places.give_back(1.0, out_of_turn=False)
    task.cancel()  # cancelled after it was given the slot and before it ran
    await asyncio.gather(task, return_exceptions=True)
    assert places.take_now() and not places.take_now()
