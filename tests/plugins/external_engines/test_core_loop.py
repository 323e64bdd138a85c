"""The core loop over a scripted core that rejects requests, dies, or delivers samples in any order."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from typing import final

import pytest

from inference_contract.errors import Dirty, EngineStopped, InvalidRequest
from inference_contract.schemas import ChatCompletionRequest, EngineState
from inference_contract.weights import DType, OnUpdate, ParameterSpec, WeightLayout
from pipelinerl.engines.batching.batching_engine import BatchingEngine
from pipelinerl.engines.batching.model_runner import Capacity
from pipelinerl.plugins.external_engines.core_loop import CoreLoop, CoreModel, Sampled, Step, sample_id
from tests.fakes.engine_options import engine_options
from tests.patience import PATIENCE_S

OPTIONS = engine_options(context_length=32, max_waiting=8)
LAYOUT = WeightLayout(parameters=(ParameterSpec(name="w", shape=(1,), dtype=DType.FLOAT32),))
#: The end-of-sample token.
STOP = 0


@final
class ScriptedCore:
    """An `EngineCore` that delivers scripted steps, and rejects or dies on demand."""

    def __init__(self):
        self.begun = []
        self.calls = []
        self.results = asyncio.Queue()
        self.refusal = None
        # called just before the core dies, in the same iteration of the event loop
        self.last_act = lambda: None
        self.may_pause = threading.Event()
        self.may_pause.set()
        self.may_stage = threading.Event()
        self.may_stage.set()
        self.may_close = threading.Event()
        self.may_close.set()
        self.is_closed = False

    def check(self, request):
        """Check nothing: a scripted core accepts every request."""

    async def add(self, sequences, *, salt):
        if self.refusal is not None:
            raise self.refusal
        self.begun += sequences

    async def abort(self, sample_ids):
        return None

    async def next_step(self):
        result = await self.results.get()
        if isinstance(result, Exception):
            self.last_act()
            raise result
        return result

    async def pause(self, on_update):
        self.calls.append("pause")
        while not self.may_pause.is_set():
            await asyncio.sleep(0.002)

    async def resume(self):
        self.calls.append("resume")

    async def stage(self):
        self.calls.append("stage")
        while not self.may_stage.is_set():
            await asyncio.sleep(0.002)

    async def load_staged(self, epoch, version):
        self.calls.append("load")

    async def forget_cache(self):
        return None

    async def close(self):
        while not self.may_close.is_set():
            await asyncio.sleep(0.002)
        self.is_closed = True


class Letters:
    """A stand-in for `ChatTokenizer` with a letter for each token."""

    eos_token_ids = frozenset({STOP})

    def encode_chat(self, messages, template_kwargs=(), tools=()):
        raise AssertionError("prompts come as tokens")

    def encode_prompt(self, text):
        return [1]

    def decode(self, token_ids):
        return "x" * len(token_ids)

    def detokenizer(self):
        raise AssertionError("nothing is streamed")


@final
class World:
    """An engine over the scripted core, with helpers that submit requests and make the core act."""

    def __init__(self, core):
        self.core = core
        self.loop: CoreLoop
        self.engine = BatchingEngine(OPTIONS, loop=self._loop, tokenizer=Letters())

    def _loop(self, deliver):
        model = CoreModel(
            slots=OPTIONS.slots,
            context_length=OPTIONS.context_length,
            vocab_size=8,
            layout=LAYOUT,
            cache_bytes=0,
            staged=None,
        )

        async def start():
            return self.core, model

        self.loop = CoreLoop(
            start_core=start, capacity=Capacity(OPTIONS.slots, OPTIONS.max_waiting), deliver=deliver, serving=(1, 57)
        )
        return self.loop

    async def submitted(self, n=1):
        """Submit a request, and return once the core has begun the samples of the request."""
        task = asyncio.create_task(self.engine.complete(ChatCompletionRequest(prompt_token_ids=[1, 2], n=n)))
        while len(self.core.begun) < n:
            await asyncio.sleep(0.002)
        return task

    def tell(self, result):
        self.loop._events.call_soon_threadsafe(self.core.results.put_nowait, result)


@asynccontextmanager
async def world():
    made = World(ScriptedCore())
    await made.engine.start()
    try:
        yield made
    finally:
        await made.engine.close()


async def test_request_rejected_by_the_engine_core_fails_and_later_requests_succeed():
    async with world() as made:
        made.core.refusal = ValueError("temperature must be in [0, 2], got 2.5.")
        with pytest.raises(InvalidRequest, match="core rejects the request: temperature must be in"):
            await asyncio.wait_for(made.engine.complete(ChatCompletionRequest(prompt_token_ids=[1], n=3)), PATIENCE_S)
        assert (made.loop.num_running, made.loop.num_waiting) == (0, 0), "their places are free again"
        made.core.refusal = None
        pending = await made.submitted()
        made.tell(Step((1, 57), [Sampled(sample_id(made.core.begun[0]), [STOP], [-1.0], 1, True)]))
        assert (await asyncio.wait_for(pending, PATIENCE_S)).epoch == 1


async def test_trainer_epoch_of_an_answer_is_that_of_its_first_sampled_token():
    """The second of two samples gets its first token in epoch 1, the first sample only in epoch 2."""
    async with world() as made:
        pending = await made.submitted(2)
        first, second = (sample_id(sequence) for sequence in made.core.begun)
        made.tell(Step((1, 57), [Sampled(second, [5, STOP], [-1.0, -1.0], 2, True)]))
        made.tell(Step((2, 50), [Sampled(first, [5, STOP], [-1.0, -1.0], 2, True)]))
        assert (await asyncio.wait_for(pending, PATIENCE_S)).epoch == 1


async def test_busy_time_metric_grows_only_while_the_engine_core_has_samples():
    async with world() as made:
        for number in (1, 2):
            task = await made.submitted(number)
            await asyncio.sleep(0.02)
            made.tell(Step((1, 57), [Sampled(sample_id(each), [STOP], [-1.0], 1, True) for each in made.core.begun]))
            await task
            made.core.begun.clear()
            busy_s = made.engine.metrics().busy_s_total
            assert busy_s >= number * 0.02
            await asyncio.sleep(0.02)
            assert made.engine.metrics().busy_s_total == busy_s


# The thread of the loop ends with an exception in this test.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_requests_fail_immediately_when_the_core_dies_and_stopping_again_does_not_interrupt_its_closing():
    """An interrupted close would leak the core's resources, such as connections."""
    async with world() as made:
        made.core.may_close.clear()
        pending = await made.submitted()
        made.tell(RuntimeError("the core has died"))
        with pytest.raises(EngineStopped):
            await asyncio.wait_for(pending, PATIENCE_S)  # from here on, the core is being closed
        with pytest.raises(EngineStopped):
            await made.engine.complete(ChatCompletionRequest(prompt_token_ids=[1]))
        assert made.engine.health().state is EngineState.STOPPED
        for _ in range(2):
            assert not await asyncio.to_thread(made.loop.stop, 0.05)
        assert not made.core.is_closed
        made.core.may_close.set()
        assert await asyncio.to_thread(made.loop.stop, PATIENCE_S)
        assert made.core.is_closed


# The thread of the loop ends with an exception in this test.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_commit_queued_while_the_core_dies_fails_with_engine_stopped():
    async with world() as made:
        queued = []
        made.core.last_act = lambda: queued.append(made.loop.commit(version=58, epoch=1, on_update=OnUpdate.CONTINUE))
        made.tell(RuntimeError("the core has died"))
        while not queued:
            await asyncio.sleep(0.002)
        assert await asyncio.to_thread(made.loop.stop, PATIENCE_S)
        assert queued[0].done(), "its caller would wait for ever"
        assert isinstance(queued[0].exception(), EngineStopped)


async def test_commit_stages_the_new_weights_before_it_pauses_the_engine_core():
    async with world() as made:
        await made.engine.commit(version=58, epoch=1, on_update=OnUpdate.CONTINUE)
        assert made.core.calls == ["stage", "pause", "load", "resume"]


async def test_commit_fails_with_engine_stopped_if_the_loop_stops_while_weights_are_staged():
    async with world() as made:
        made.core.may_stage.clear()
        commit = asyncio.create_task(made.engine.commit(version=58, epoch=1, on_update=OnUpdate.CONTINUE))
        while made.core.calls != ["stage"]:
            await asyncio.sleep(0.002)
        assert await asyncio.to_thread(made.loop.stop, PATIENCE_S)
        with pytest.raises(EngineStopped):
            await asyncio.wait_for(commit, PATIENCE_S)


async def test_cancelled_commit_ends_running_samples_and_the_next_commit_succeeds():
    """It is unknown which weights would continue the running samples, so these samples end with an error."""
    async with world() as made:
        pending = await made.submitted()
        made.core.may_pause.clear()
        commit = asyncio.create_task(made.engine.commit(version=58, epoch=1, on_update=OnUpdate.CONTINUE))
        while made.loop._commit is None or not made.loop._turn.locked():
            await asyncio.sleep(0.002)
        commit.cancel()
        with pytest.raises(asyncio.CancelledError):
            await commit
        with pytest.raises(Dirty):
            await asyncio.wait_for(pending, PATIENCE_S)
        made.core.may_pause.set()
        await asyncio.wait_for(made.engine.commit(version=58, epoch=1, on_update=OnUpdate.CONTINUE), PATIENCE_S)
        assert made.loop.serving == (1, 58)


async def test_core_loop_can_be_stopped_while_its_thread_is_ending(monkeypatch):
    """The thread's event loop closes before the thread ends; the test delays the thread between these two moments."""
    ending, may_end = threading.Event(), threading.Event()

    def hold(_):
        """Delay the end of the thread: its excepthook runs after all its other work."""
        ending.set()
        may_end.wait(PATIENCE_S)

    monkeypatch.setattr(threading, "excepthook", hold)
    async with world() as made:
        made.tell(RuntimeError("the core has died"))
        assert await asyncio.to_thread(ending.wait, PATIENCE_S)
        assert not await asyncio.to_thread(made.loop.stop, 0.05), "the thread is held"
        may_end.set()
        assert await asyncio.to_thread(made.loop.stop, PATIENCE_S)
