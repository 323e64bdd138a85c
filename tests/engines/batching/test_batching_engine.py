"""Tests of `BatchingEngine` on a bigram model, whose token probabilities depend only on the previous token."""

import asyncio
import itertools
import math
import threading
from contextlib import aclosing

import numpy as np
import pytest

from inference_contract.errors import ContractError, EngineStopped, InvalidRequest, NotFinite, UpdateInProgress
from inference_contract.schemas import ChatCompletionRequest, ChatMessage, EngineState, FinishReason
from inference_contract.weights import OnUpdate
from pipelinerl.engines.batching.batching_engine import BatchingEngine
from pipelinerl.plugins.bigram.model import BigramModel
from tests.fakes.engine_options import bigram_engine, engine_options
from tests.fakes.gated_runner import DEADLINE_S


def _ask(*prompt, n=1, max_tokens=5, **others):
    fields = {"prompt_token_ids": list(prompt) or [7], "n": n, "max_tokens": max_tokens, "seed": 3} | others
    return ChatCompletionRequest.model_validate(fields | {"return_token_ids": True})


async def _submitted(engine, request):
    """Submit a request, and return once the request is queued, so that the next decode step admits it."""
    task = asyncio.create_task(engine.complete(request))
    await asyncio.sleep(0)
    return task


async def _started(engine, gate, request):
    """Submit the first request of an idle engine, and return once its first decode step waits at the gate."""
    task = await _submitted(engine, request)
    await _until(lambda: gate.waiting)
    return task


async def _until(condition):
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.001)


async def _steps(engine, gate, count):
    """Allow `count` decode steps; return once the next step waits at the gate, or no work is left."""
    await asyncio.to_thread(gate.allow, count)
    await _until(lambda: gate.waiting or engine.metrics().running_sequences + engine.metrics().waiting_sequences == 0)


# --- one request -------------------------------------------------------------------------------------------------


@pytest.fixture
async def alternating(tokenizer):
    """A started engine that samples token 8 after 7 and after the end token, and the end token after 8."""
    (end,) = tokenizer.eos_token_ids
    logits = np.full((tokenizer.vocab_size, tokenizer.vocab_size), -50.0, dtype=np.float32)
    logits[7, 8] = logits[8, end] = logits[end, 8] = 0.0
    built = bigram_engine(tokenizer, logits=logits)
    await built.start()
    yield built
    await built.close()


async def test_ignore_eos_makes_samples_continue_after_end_tokens_and_allows_end_tokens_in_prefixes(
    alternating, tokenizer
):
    """With `ignore_eos`, an end token is part of the text, and other tokens may follow the end token."""
    (end,), built = tokenizer.eos_token_ids, alternating
    ask = _ask(7, max_tokens=4, ignore_eos=True)
    (choice,) = (await built.complete(ask)).choices
    assert (choice.token_ids, choice.finish_reason) == ([8, end, 8, end], FinishReason.LENGTH)
    assert choice.message.content == tokenizer.decode([8, end, 8, end])
    streamed = [chunk async for chunk in built.stream(ask.model_copy(update={"stream": True}))]
    assert "".join(part.delta.content or "" for chunk in streamed for part in chunk.choices) == choice.message.content
    prefixed = {"prefixes": [{"index": 0, "token_ids": [8, end]}]}
    (rest,) = (await built.complete(_ask(7, max_tokens=4, ignore_eos=True, **prefixed))).choices
    assert (rest.token_ids, rest.message.content) == ([8, end], choice.message.content)
    with pytest.raises(InvalidRequest, match="has a token that ends a sample"):
        await built.complete(_ask(7, max_tokens=4, **prefixed))


async def test_context_length_limits_prompt_plus_answer_tokens(engine, gate):
    gate.open()
    answer = await engine.complete(_ask(*range(6, 46), max_tokens=1000))
    assert answer.usage.total_tokens == gate.context_length


# --- batching ----------------------------------------------------------------------------------------------------


async def test_samples_of_one_request_that_start_together_share_one_prefill(engine, gate):
    task = await _started(engine, gate, _ask(7, 8, 9, n=6, max_tokens=3))
    await _steps(engine, gate, 1)
    assert gate.log == ["prefill 2 tokens to rows [0, 1, 2, 3]"]
    gate.open()
    answer = await task
    # Six samples of equal length share four rows. When the last two start, no sample of the request is running from
    # which they could copy the prompt cache, so they prefill again.
    assert gate.log[1:] == ["prefill 2 tokens to rows [0, 1]"]
    assert [len(choice.token_ids or []) for choice in answer.choices] == [3] * 6


async def test_samples_can_join_and_leave_the_batch_at_any_step(engine, gate):
    lengths = [1, 1, 2, 3, 4, 5, 6, 7]
    tasks = [await _started(engine, gate, _ask(7, max_tokens=1))]
    tasks += [await _submitted(engine, _ask(7, max_tokens=length)) for length in lengths[1:]]
    await _steps(engine, gate, 9)
    # The first step has sequence 0 alone. In the next steps, the four rows hold these sequences:
    # 1, 2, 3, 4 | 5, 2, 3, 4 | 5, 6, 3, 4 | 5, 6, 7, 4 | 5, 6, 7 | 5, 6, 7 | 6, 7 | 6, 7.
    assert gate.batch_sizes == [1, 4, 4, 4, 4, 3, 3, 2, 2]
    gate.open()
    answers = await asyncio.gather(*tasks)
    assert [answer.usage.completion_tokens for answer in answers] == lengths
    metrics = engine.metrics()
    assert metrics.occupied_slot_steps_total == metrics.generated_tokens_total == sum(lengths)
    assert (metrics.finished_sequences_total, metrics.running_sequences) == (8, 0)
    assert metrics.busy_s_total > 0  # not exact, as the last step may not be counted yet


async def test_cancelled_request_frees_its_batch_rows_and_queue_slots(engine, gate):
    gone = await _started(engine, gate, _ask(7, n=6, max_tokens=50))
    waiting = await _submitted(engine, _ask(8, n=2, max_tokens=2))
    await _steps(engine, gate, 1)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    gate.open()
    answer = await asyncio.wait_for(waiting, DEADLINE_S)
    assert len(answer.choices) == 2
    metrics = engine.metrics()
    assert (metrics.aborted_sequences_total, metrics.running_sequences, metrics.waiting_sequences) == (6, 0, 0)


# --- streaming ---------------------------------------------------------------------------------------------------


def _rare(interval_s):
    return _ask(n=2, max_tokens=20, stream=True, stream_options={"interval_s": interval_s})


async def test_stream_with_an_interval_between_chunks_holds_back_only_the_newest_token(engine, gate):
    async with aclosing(engine.stream(_rare(0.02))) as stream, asyncio.timeout(DEADLINE_S):
        coming = asyncio.ensure_future(anext(stream))
        await asyncio.to_thread(gate.allow, 4)
        chunk = await coming
        counts = [len(part.token_ids or ()) for part in chunk.choices]
        while min(counts) < 3:
            chunk = await anext(stream)
            counts = [a + len(part.token_ids or ()) for a, part in zip(counts, chunk.choices, strict=True)]
        assert counts == [3, 3], "the fourth may be the last"
        gate.open()
        rest = [part async for later in stream for part in later.choices]
    assert sum(len(part.token_ids or ()) for part in rest) == 2 * 17
    whole = await engine.complete(_ask(n=2, max_tokens=20))
    assert [part.delta.content for part in rest if part.finish_reason] == [c.message.content for c in whole.choices]


async def test_closing_engine_streams_all_sampled_tokens_before_the_error(engine, gate):
    """No sampled token is lost, even if the streaming interval is far longer than the time until the close."""
    came = []

    async def follow():
        async for chunk in engine.stream(_rare(3600.0)):
            came.extend(len(part.token_ids or ()) for part in chunk.choices)

    following = asyncio.create_task(follow())
    await asyncio.to_thread(gate.allow, 5)
    closing = asyncio.create_task(engine.close())
    await _until(lambda: engine.health().state is EngineState.STOPPED)  # or the engine would finish the answer
    gate.open()
    with pytest.raises(EngineStopped):
        await following
    await closing
    assert len(came) == 2 and min(came) >= 5


# --- weight updates ----------------------------------------------------------------------------------------------


async def test_call_between_steps_runs_once_on_the_thread_that_computes(engine, gate):
    task, calls = await _started(engine, gate, _ask(7, max_tokens=12)), []
    engine.between_steps(lambda: calls.append(threading.current_thread().name))
    await _steps(engine, gate, 3)
    assert calls == ["decode"]
    gate.open()
    await task


async def _commit(engine, on_update, version=1):
    logits = BigramModel.random(engine.layout.parameters[0].shape[0], seed=version).logits
    engine.staging()[:] = logits.reshape(-1).view(np.uint8)
    task = asyncio.create_task(engine.commit(version=version, epoch=0, on_update=on_update))
    await asyncio.sleep(0)
    return task


async def _updated(engine, gate, on_update, version=1):
    commit = await _commit(engine, on_update, version)
    await _steps(engine, gate, 1)
    await commit


async def test_update_in_continue_mode_keeps_the_kv_cache_and_update_in_recompute_kv_mode_rebuilds_it(engine, gate):
    task = await _started(engine, gate, _ask(7, 8, 9, n=2, max_tokens=12))
    await _steps(engine, gate, 1)
    for version, on_update in ((1, OnUpdate.CONTINUE), (2, OnUpdate.RECOMPUTE_KV)):
        await _updated(engine, gate, on_update, version)
    # The last prefills cover three prompt tokens and two of three sampled tokens; the next step feeds the newest.
    assert gate.log == [
        "prefill 2 tokens to rows [0, 1]",
        "swap",
        "swap",
        "prefill 5 tokens to rows [0]",
        "prefill 5 tokens to rows [1]",
    ]
    gate.open()
    assert len((await task).choices) == 2


async def test_update_in_recompute_kv_mode_prefills_identical_contexts_only_once(engine, gate):
    task = await _started(engine, gate, _ask(7, 8, 9, n=2, max_tokens=12, temperature=0.0))
    await _steps(engine, gate, 1)
    await _updated(engine, gate, OnUpdate.RECOMPUTE_KV, 1)
    assert gate.log == ["prefill 2 tokens to rows [0, 1]", "swap", "prefill 4 tokens to rows [0, 1]"]
    gate.open()
    one, other = (await task).choices
    assert one.token_ids == other.token_ids


async def test_update_in_recompute_kv_mode_prefills_the_given_prefix_and_the_new_tokens(engine, gate):
    prefixes = [{"index": 0, "token_ids": [5, 6]}]
    running = await _started(engine, gate, _ask(7, 8, 9, max_tokens=20, prefixes=prefixes))
    await _steps(engine, gate, 1)
    await _updated(engine, gate, OnUpdate.RECOMPUTE_KV)
    assert gate.log == ["prefill 4 tokens to rows [0]", "swap", "prefill 6 tokens to rows [0]"]
    gate.open()
    await running


@pytest.mark.parametrize(
    ("on_update", "joins"),
    [
        (OnUpdate.CONTINUE, ["prefill 2 tokens to rows [3]", "copy 2 tokens from row 1 to rows [3]"]),
        (OnUpdate.RECOMPUTE_KV, ["copy 2 tokens from row 0 to rows [3]", "copy 2 tokens from row 0 to rows [3]"]),
    ],
)
async def test_sample_that_starts_after_an_update_does_not_reuse_the_prompt_cache_of_older_weights(
    engine, gate, on_update, joins
):
    """A sample that starts after an update reports the new weights only, so its prompt must be prefilled with them."""
    shorts = [await _started(engine, gate, _ask(7, 8, max_tokens=3))]
    shorts.append(await _submitted(engine, _ask(7, 8, max_tokens=3)))
    long = await _submitted(engine, _ask(7, 8, 9, n=4, max_tokens=9))
    await _steps(engine, gate, 1)
    await _updated(engine, gate, on_update)
    known = len(gate.log)
    await _steps(engine, gate, 2)  # each step ends one short sample, and a waiting sample gets the free row
    assert gate.log[known:] == joins
    gate.open()
    choices = (await long).choices
    assert [choice.version_spans for choice in choices] == [[(0, 1), (1, 8)]] * 2 + [[(1, 9)]] * 2
    await asyncio.gather(*shorts)


async def test_update_in_drain_mode_waits_for_running_samples(engine, gate):
    running = await _started(engine, gate, _ask(7, n=3, max_tokens=6))
    await _steps(engine, gate, 2)
    commit = await _commit(engine, OnUpdate.DRAIN)
    waiting = await _submitted(engine, _ask(8, max_tokens=2))
    await _steps(engine, gate, 2)
    assert not commit.done() and engine.serving() == (0, 0)
    with pytest.raises(UpdateInProgress, match=r"0\.1 still waits"):
        await engine.commit(version=2, epoch=0, on_update=OnUpdate.CONTINUE)
    gate.open()
    await commit
    assert {tuple(choice.version_spans or []) for choice in (await running).choices} == {((0, 6),)}
    assert (await waiting).choices[0].version_spans == [(1, 2)]
    assert gate.batch_sizes == [3] * 6 + [1] * 2


# --- closing and failures ----------------------------------------------------------------------------------------


async def test_closing_the_engine_fails_requests_and_pending_weight_commits_with_engine_stopped(engine, gate):
    running = await _started(engine, gate, _ask(7, n=4, max_tokens=50))
    waiting = await _submitted(engine, _ask(8))
    await _steps(engine, gate, 1)
    commit = await _commit(engine, OnUpdate.DRAIN)
    closing = asyncio.create_task(engine.close())
    # Wait before the gate opens, or the engine would finish the answers.
    await _until(lambda: engine.health().state is EngineState.STOPPED)
    gate.open()
    await closing
    for task in (running, waiting, commit):
        with pytest.raises(EngineStopped):
            await asyncio.wait_for(task, DEADLINE_S)
    with pytest.raises(EngineStopped):
        await engine.complete(_ask(7))
    assert engine.health().state is EngineState.STOPPED


async def test_closing_the_engine_fails_requests_that_are_still_being_tokenised(engine, endless, monkeypatch):
    """After `EngineStopped` the actor retries on another engine; any other error would fail the whole group."""
    request = ChatCompletionRequest(messages=[ChatMessage(role="user", content="hi")], max_tokens=2, seed=0)
    begun, go_on = threading.Event(), threading.Event()

    def slow(*_):
        begun.set()
        assert go_on.wait(DEADLINE_S)
        return [7]

    monkeypatch.setattr(endless, "encode_chat", slow)
    tokenised = asyncio.create_task(engine.complete(request))
    await _until(begun.is_set)
    queued = await _submitted(engine, request)
    await engine.close()
    go_on.set()
    for late in (tokenised, queued, asyncio.create_task(engine.complete(request))):
        with pytest.raises(EngineStopped, match=r"send .* to another"):
            await asyncio.wait_for(late, DEADLINE_S)


def _spoil(gate, *, step, row):
    decode, first = gate.decode, gate.steps

    def spoiled(num_rows):
        token_ids, logprobs = decode(num_rows)
        if gate.steps == first + step:
            logprobs[row] = math.nan
        return token_ids, logprobs

    gate.decode = spoiled


async def test_request_with_nonfinite_logits_fails_without_affecting_other_requests(engine, gate):
    """One of three running samples of the request gets NaN logits, while the fourth sample still waits for a row."""
    one, doomed, other = _ask(7, max_tokens=9), _ask(8, n=4, max_tokens=9, seed=5), _ask(9, max_tokens=9, seed=6)
    tasks = [await _started(engine, gate, request) for request in (one,)]
    tasks += [await _submitted(engine, request) for request in (doomed, other)]
    _spoil(gate, step=3, row=2)  # row 2 belongs to the second request, which starts at step 2
    await _steps(engine, gate, 3)
    with pytest.raises(NotFinite, match="NaN or infinity for token 1 of choice 1 after a prompt of 1 token"):
        await asyncio.wait_for(tasks[1], DEADLINE_S)
    gate.open()
    answers = [(await task).choices for task in (tasks[0], tasks[2])]
    assert engine.health().state is EngineState.READY
    metrics = engine.metrics()
    assert (metrics.aborted_sequences_total, metrics.finished_sequences_total, metrics.running_sequences) == (4, 2, 0)
    assert metrics.generated_tokens_total == 9 + 9 + 3
    assert answers == [(await engine.complete(request)).choices for request in (one, other)]


async def test_sample_moved_into_the_batch_row_of_a_failed_request_keeps_its_tokens(engine, gate):
    doomed, kept = _ask(8, max_tokens=9), _ask(9, max_tokens=9, seed=6)
    tasks = [await _started(engine, gate, doomed), await _submitted(engine, kept)]
    _spoil(gate, step=2, row=0)
    gate.open()
    with pytest.raises(NotFinite):
        await asyncio.wait_for(tasks[0], DEADLINE_S)
    assert (await tasks[1]).choices == (await engine.complete(kept)).choices


async def test_stream_with_nonfinite_logits_raises_before_yielding_the_bad_token(engine, gate):
    _spoil(gate, step=3, row=0)
    gate.open()
    tokens = []
    with pytest.raises(NotFinite, match="for token 2 of choice 0"):
        async for chunk in engine.stream(_ask(7, max_tokens=9, stream=True)):
            tokens += [token for choice in chunk.choices for token in choice.token_ids or []]
    assert len(tokens) == 2
    assert engine.health().state is EngineState.READY


def _break(gate, method, *, calls):
    """Let the next `calls` calls of a method of the runner raise `IndexError`."""
    real, left = getattr(gate, method), itertools.count(calls, -1)

    def broken(*arguments):
        if next(left) > 0:
            raise IndexError("index 512 is out of bounds\nat some kernel")
        return real(*arguments)

    setattr(gate, method, broken)


async def test_exception_in_a_decode_step_fails_only_the_running_requests(engine, gate):
    doomed, kept = _ask(8, n=3, max_tokens=9), _ask(9, max_tokens=9, seed=6)
    task = await _started(engine, gate, doomed)
    waiting = await _submitted(engine, kept)
    _break(gate, "decode", calls=1)
    gate.open()  # the step at the gate was called before it broke; the next one raises
    answers = await asyncio.gather(task, waiting, return_exceptions=True)
    assert {type(answer) for answer in answers} == {ContractError}, "the second request has joined the broken step"
    assert "IndexError: index 512 is out of bounds; retry" in str(answers[0]) and "kernel" not in str(answers[0])
    assert (await engine.complete(kept)).choices == (await engine.complete(kept)).choices
    assert engine.health().state is EngineState.READY
    assert engine.metrics().running_sequences == engine.metrics().waiting_sequences == 0


@pytest.mark.parametrize("method", ["prefill", "place"])
async def test_exception_in_a_prefill_fails_only_the_admitted_requests(engine, gate, method):
    kept = _ask(9, max_tokens=9, seed=6)
    running = await _started(engine, gate, kept)
    _break(gate, method, calls=1)
    doomed = await _submitted(engine, _ask(8, 5, n=2))
    gate.open()
    with pytest.raises(ContractError, match="IndexError"):
        await asyncio.wait_for(doomed, DEADLINE_S)
    assert (await running).choices == (await engine.complete(kept)).choices
    assert engine.health().state is EngineState.READY


@pytest.mark.parametrize("survives", [False, True])
async def test_engine_stops_if_its_cache_is_in_doubt_or_every_step_fails(gate, endless, monkeypatch, survives):
    reported = []
    monkeypatch.setattr("threading.excepthook", lambda fault: reported.append(str(fault.exc_value)))
    built = BatchingEngine(engine_options(), load=lambda: gate, tokenizer=endless)
    await built.start()
    _break(gate, "decode", calls=100)
    gate.survives = lambda error: survives
    failed = 0
    with pytest.raises(EngineStopped):
        while True:
            try:
                await asyncio.wait_for(built.complete(_ask(7)), DEADLINE_S)
            except ContractError as error:
                if isinstance(error, EngineStopped):
                    raise
                failed += 1
    await built.close()
    assert built.health().state is EngineState.STOPPED
    assert failed == (9 if survives else 0)
    assert len(reported) == 1 and reported[0].startswith("index 512")


async def test_engine_start_raises_the_error_of_a_failed_model_load(endless):
    def load():
        raise RuntimeError("no such model")

    built = BatchingEngine(engine_options(), load=load, tokenizer=endless)
    with pytest.raises(RuntimeError, match="no such model"):
        await built.start()
    await built.close()


async def test_cancelled_engine_start_leaves_no_thread_running(gate, endless, monkeypatch):
    """Loading a model cannot be interrupted, so it completes; the loading thread then ends without an error."""
    reported = []
    monkeypatch.setattr("threading.excepthook", reported.append)
    loading, may_load = threading.Event(), threading.Event()
    threads = []

    def load():
        threads.append(threading.current_thread())
        loading.set()
        assert may_load.wait(DEADLINE_S)
        return gate

    built = BatchingEngine(engine_options(), load=load, tokenizer=endless)
    starting = asyncio.create_task(built.start())
    assert await asyncio.to_thread(loading.wait, DEADLINE_S)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    may_load.set()
    await asyncio.to_thread(threads[0].join, DEADLINE_S)
    assert not threads[0].is_alive() and not reported
