"""Teachers that reply with anything: log-probs are finite and at most 0, or an error names the teacher."""

import asyncio
import json
import threading
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from pipelinerl.engines.http.engine_teacher import EngineTeacher
from pipelinerl.errors import EngineUnreachable
from tests.fakes.batches import batch_of
from tests.fakes.hostile_replies import mutated
from tests.fakes.raw_server import raw_server, response
from tests.fakes.rollouts import group, rollout
from tests.patience import PATIENCE_S

TOKENS = 6


@contextmanager
def teaching():
    """Yield a teacher's URL and its responses; it sends the last one, and runs on a thread of its own."""
    replies, over = [b""], Future[None]()
    started = Future()

    async def send(head, writer):
        writer.write(replies[-1])

    async def serve():
        async with raw_server(send) as url:
            started.set_result(url)
            await asyncio.wrap_future(over)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    try:
        yield started.result(PATIENCE_S), replies
    finally:
        over.set_result(None)
        thread.join(PATIENCE_S)


def completion(logprobs):
    choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "length"}
    usage = {"prompt_tokens": TOKENS, "completion_tokens": 1, "total_tokens": TOKENS + 1}
    return {
        "id": "x", "created": 1, "model": "m", "choices": [choice], "usage": usage, "model_version": 0,
        "prompt_logprobs": logprobs,
    }  # fmt: skip


VALID = completion([0.0, -1.0, -2.5, -0.25, -1e-7, -30.0])


def packed():
    one = rollout(prompt=[3] * 4, sampled=[4] * 2)
    groups = [replace(group(0), rollouts=(one,))]
    (batch,) = batch_of(groups, "reinforce", token_budget=64).micro_batches
    return batch


def test_overloaded_teacher_is_retried_and_a_refusal_or_a_redirect_is_not():
    with teaching() as (url, replies), closing(EngineTeacher(url, timeout_s=PATIENCE_S)) as teacher:
        replies.append(response(b"busy", status=529))
        threading.Timer(0.2, lambda: replies.append(response(json.dumps(VALID).encode()))).start()
        assert len(teacher.forward([packed()])[0]) == TOKENS
        for bad, reason in (
            (response(b"who are you", status=401), "HTTP 401: who are you"),
            (response(b"", status=307, location="http://other"), "it redirects to http://other"),
            (response(b"x", content_encoding="gzip"), "compressed response"),
        ):
            replies.append(bad)
            with pytest.raises(EngineUnreachable, match=f"the teacher {url} gives no log-probs: .*{reason}"):
                teacher.forward([packed()])


@pytest.mark.parametrize("cases", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_any_reply_of_a_teacher_gives_valid_log_probs_or_an_error_that_names_it(cases):
    draw, refused = Random(cases), 0
    with teaching() as (url, replies), closing(EngineTeacher(url, timeout_s=PATIENCE_S)) as teacher:
        for _ in range(cases):
            body = mutated(VALID, draw)
            replies[:] = [response(body)]
            try:
                (column,) = teacher.forward([packed()])
            except EngineUnreachable as error:
                assert f"the teacher {url}" in str(error)
                refused += 1
            else:
                assert np.isfinite(column).all() and column.max() <= 1e-3
                assert column.tolist() == np.float32(json.loads(body)["prompt_logprobs"]).tolist(), body[:200]
    assert 0.2 < refused / cases < 1
