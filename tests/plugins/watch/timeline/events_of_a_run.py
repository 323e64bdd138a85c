"""Events of an invented run for timeline tests: two engines, groups, an evaluation, a checkpoint and a knob change."""

from __future__ import annotations

from typing import Any

A, B = "http://127.0.0.1:4001", "http://127.0.0.1:4002"
BEGAN = 1.76e9
#: In each step, the trainer waits for rollouts for WAIT_S seconds, and then computes for STEP_S seconds.
WAIT_S, STEP_S = 0.25, 0.5

Events = list[dict[str, Any]]


def event(kind: str, elapsed_s: float, **fields: Any) -> dict[str, Any]:
    return {"time": BEGAN + elapsed_s, "kind": kind, "elapsed_s": elapsed_s, **fields}


def stages(order: int, at: float, *, engine: str = A, spans: Any = ((0, 4), (1, 2))) -> list[Any]:
    """Return the stages of an order, with Unix times: claimed 1 s, sampled 0.2 s and judged 0.1 s before `at`."""
    return [order, BEGAN + at - 1.0, BEGAN + at - 0.2, BEGAN + at - 0.1, engine, [list(span) for span in spans]]


def step(number: int, at: float, **fields: Any) -> dict[str, Any]:
    orders = [2 * number, 2 * number + 1]
    traced = [stages(orders[0], at - STEP_S)]
    return event(
        "step", at, step=number, model_version=number, orders=orders, stages=traced, reward=0.5, step_s=STEP_S,
        wait_s=WAIT_S, publish_wait_s=0.0625, **fields,
    )  # fmt: skip


def publish(version: int, at: float, *urls: str) -> dict[str, Any]:
    pauses = dict.fromkeys(urls, 0.001)
    return event("publish", at, model_version=version, total_s=0.03, pause_s=0.001, pauses_s=pauses, failed={})


def run(steps: int = 6, *, ended: bool = True) -> Events:
    """Return the events of a run: an evaluation, then one step per second from second 10 on.

    Each version is published 0.1 s after its step. Unless `ended`, the event that marks the run's end is left out.
    """
    made = [
        event("run_started", 0.5, run="tiny"),
        event("engine_joined", 1.0, url=A),
        event("engine_joined", 2.0, url=B),
        event("trainer_ready", 3.0, epoch=1, model_version=0),
        publish(0, 4.0, A, B),
        event("evaluation_began", 4.5, model_version=0),
        event("evaluation", 8.5, model_version=0, name="held_out", accuracy=0.25),
    ]
    for number in range(1, steps + 1):
        at = 9.0 + number
        made += [step(number, at), publish(number, at + 0.1, A, B)]
        if number % 4 == 0:
            made.append(event("checkpoint", at + 0.3, model_version=number, path="x", stall_s=0.05))
    made.append(event("knobs", 9.6 + steps, changes={"k": 4}, who="ann", step=steps))
    if ended:
        made.append(event("run_finished", 10.0 + steps, reason="all steps are done"))
    return made
