"""The engine pool completes requests even if engines are full, slow, gone, or between two weight versions."""

import asyncio
import itertools
from collections import Counter

import pytest
from hypothesis import given, strategies as st

from inference_contract.errors import ContractError, Dirty, EngineStopped, InvalidRequest, NotFinite, Overloaded
from inference_contract.schemas import ChatCompletion, ChatCompletionRequest, ChatMessage, EngineState, Health, Usage
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.engines.http.pool import NEAR_TOKENS, EnginePool, LeastBusy, cost
from pipelinerl.engines.http.prompts import PromptCheck
from pipelinerl.engines.http.server import create_app
from pipelinerl.errors import DeadlineError, EngineUnreachable
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.plugins.warmstart.tiny_decoder import char_tokenizer
from tests.fakes.engine_options import bigram_engine
from tests.fakes.served import in_thread
from tests.patience import PATIENCE_S, SOON_S

URLS = ("a", "b", "c", "d")


def slow(tokens, serving, avoided, speeds, more=0):
    """Return the engine that is done first by a plain scan of all engines: the reference for the real choice."""
    key = lambda url: ((tokens[url] + more) / speeds.get(url, 1.0), url)  # noqa: E731
    return min(serving - avoided, key=key, default=None)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.sampled_from(URLS), st.integers(0, 9)),
            st.tuples(st.just("give back"), st.sampled_from(URLS), st.just(0)),
            st.tuples(st.just("serve"), st.sets(st.sampled_from(URLS)), st.integers(0, 9)),
            st.tuples(st.just("pick"), st.sets(st.sampled_from(URLS)), st.integers(0, 9)),
        ),
        max_size=200,
    )
)
def test_indexed_choice_of_the_engine_that_is_done_first_equals_that_of_a_full_scan(history):
    load, tokens, serving, speeds = LeastBusy(), Counter[str](), set[str](), dict[str, float]()
    added = []
    for what, of, number in history:
        if isinstance(of, set):
            if what == "serve":
                serving = set(of)
                speeds = {"b": number / 4, "d": 0.5} if number % 3 and "a" in of else {}
                load.serve(serving, speeds)
            else:
                assert load.pick(of.__contains__, number) == slow(tokens, serving, of, speeds, number)
        elif what == "add":
            added.append((of, number))
            tokens[of] += number
            load.add(of, number)
        elif added:
            url, given_back = added.pop()
            tokens[url] -= given_back
            load.add(url, -given_back)
        assert load.pick(lambda url: False) == slow(tokens, serving, set(), speeds)
        assert outstanding(load) == {url: tokens[url] for url in serving}


def test_equally_busy_engines_are_picked_in_order_of_name_or_in_an_order_that_differs_by_actor():
    urls = [f"http://10.0.0.{number}" for number in range(100)]

    def in_order(ties):
        load, order = LeastBusy(ties), []
        load.serve(urls)
        while (url := load.pick(order.__contains__)) is not None:
            order.append(url)
        return order

    assert in_order("") == sorted(urls)
    first, second = in_order("actor-1"), in_order("actor-2")
    assert sorted(first) == sorted(second) == sorted(urls)
    assert first == in_order("actor-1"), "the same each time"
    assert len({*first[:25], *second[:25]}) > 30, "two actors do not begin with the same engines"


def test_picking_the_least_busy_engine_does_not_scan_all_engines():
    load, looked = LeastBusy(), Counter[str]()
    load.serve(f"{number:04}" for number in range(1000))

    def busy(url):
        looked[url] += 1
        return False

    for _ in range(5000):
        url = load.pick(busy)
        assert url is not None
        load.add(url, 8)
    assert set(outstanding(load).values()) == {40}
    assert looked.total() == 5000
    assert len(load._heap) <= 4 * (1000 + 16), "what is not true any more does not pile up"


USAGE = Usage(prompt_tokens=1, completion_tokens=0, total_tokens=1)
ANSWER = ChatCompletion(id="1", created=0, model="m", choices=[], usage=USAGE, model_version=0)


def ask(**fields):
    return ChatCompletionRequest(prompt_token_ids=[1, 2, 3], seed=4, **({"max_tokens": 5} | fields))


def outstanding(load):
    return {url: load._tokens[url] for url in load._rank}


class Script:
    """An engine client whose engines answer, wait or raise as scripted."""

    def __init__(self, **engines):
        self._engines = engines
        self.calls = []

    async def chat(self, url, request):
        self.calls.append((url, request.seed))
        outcome = self._engines[url]()
        if isinstance(outcome, Exception):
            raise outcome
        if isinstance(outcome, float):
            await asyncio.sleep(outcome)
        if isinstance(outcome, asyncio.Event):
            await outcome.wait()
        return outcome if isinstance(outcome, ChatCompletion) else ANSWER

    async def health(self, url):
        return Health(state=EngineState.READY, model_version=0, epoch=0)

    async def stream(self, url, request):
        raise AssertionError("it does not offer to go on with an answer")
        yield  # makes this function an async generator


async def begun(pool, request, **how):
    """Send a request, and return once it waits for its engine."""
    task = asyncio.create_task(pool.complete(request, **how))
    await asyncio.sleep(0.01)
    return task


def test_cost_of_a_request_counts_its_prompt_once_and_the_tokens_of_every_sample():
    assert cost(ask(n=4)) == 3 + 4 * 5
    assert cost(ChatCompletionRequest(messages=[ChatMessage(role="user", content="x" * 40)], max_tokens=1)) == 11


async def test_requests_go_to_the_engine_with_the_fewest_outstanding_tokens():
    may_end = asyncio.Event()
    pool = EnginePool(Script(a=lambda: may_end, b=lambda: may_end), ["a", "b"])
    answers = [asyncio.create_task(pool.complete(ask(n=n))) for n in (8, 1, 1, 1)]
    await asyncio.sleep(0.01)
    assert outstanding(pool._load) == {"a": 43, "b": 24}
    may_end.set()
    assert [(await answer).url for answer in answers] == ["a", "b", "b", "b"]
    assert outstanding(pool._load) == {"a": 0, "b": 0}


async def test_later_turns_prefer_the_engine_of_earlier_turns_unless_it_is_much_busier():
    may_end = asyncio.Event()
    pool = EnginePool(Script(a=lambda: may_end, b=lambda: may_end), ["a", "b"])
    large = ask(n=1, max_tokens=NEAR_TOKENS)
    answers = []
    for request, near in ((ask(), "b"), (large, "b"), (ask(), "b"), (ask(), "gone")):
        answers.append(await begun(pool, request, near=near))
    may_end.set()
    assert [(await answer).url for answer in answers] == ["b", "b", "a", "a"]


@pytest.mark.parametrize(
    "error", [Overloaded("full"), Dirty("half"), EngineStopped("closing"), EngineUnreachable("gone")]
)
async def test_request_keeps_its_seed_when_it_moves_from_a_failing_engine_to_another(error):
    client = Script(a=lambda: error, b=lambda: None)
    pool = EnginePool(client, ["a", "b"])
    assert (await pool.complete(ask())).url == "b"
    assert client.calls == [("a", 4), ("b", 4)]
    assert (await pool.complete(ask(n=1))).url == "b", "the one that failed is suspect for a while"
    assert outstanding(pool._load)["a"] == 0


REFUSALS = pytest.mark.parametrize("error", [InvalidRequest("top_p is not taken", param="top_p"), NotFinite("a fault")])


@REFUSALS
async def test_request_rejected_by_every_engine_raises_promptly(error):
    client = Script(a=lambda: InvalidRequest("too long"), b=lambda: error)
    with pytest.raises(type(error), match=f"^b: {error}$") as raised:
        await asyncio.wait_for(EnginePool(client, ["a", "b"]).complete(ask()), SOON_S)
    assert raised.value.param == error.param
    assert client.calls == [("a", 4), ("b", 4)]


async def test_error_of_unknown_kind_counts_as_a_rejection_after_three_attempts():
    outcomes = [ContractError("a fault"), ContractError("a fault"), None]
    client = Script(a=lambda: outcomes.pop(0))
    assert (await EnginePool(client, ["a"], suspect_s=0.01).complete(ask())).url == "a"
    client = Script(a=lambda: ContractError("a fault"))
    with pytest.raises(ContractError, match=r"^a: a fault$"):
        await asyncio.wait_for(EnginePool(client, ["a"], suspect_s=0.01).complete(ask()), SOON_S)
    assert len(client.calls) == 3


@REFUSALS
async def test_request_is_retried_on_a_full_engine_but_not_on_an_engine_that_rejected_it(error):
    outcomes = [Overloaded("full"), Overloaded("full"), None, None]
    client = Script(a=lambda: error, b=lambda: outcomes.pop(0))
    pool = EnginePool(client, ["a", "b"])
    assert [(await pool.complete(ask())).url for _ in range(2)] == ["b", "b"]
    assert [url for url, _ in client.calls] == ["a", "b", "b", "b", "a", "b"], "a refusal says nothing of the next"


async def test_request_fails_only_when_every_serving_engine_has_rejected_it():
    pool = EnginePool(Script(a=lambda: InvalidRequest("too long"), b=lambda: Dirty("half received")), ["a", "b"])
    pending = await begun(pool, ask())
    pool.update([], finishing=["a", "b"])
    await asyncio.sleep(0.01)
    assert not pending.done()
    pool.update(["a"], finishing=["b"])
    with pytest.raises(InvalidRequest, match="a: too long"):
        await asyncio.wait_for(pending, SOON_S)


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f"}}]], ids=["plain", "tools"])
async def test_text_of_an_answer_is_reported_while_a_real_engine_samples_it(tools, tokenizer):
    request = ChatCompletionRequest(
        prompt_token_ids=[7] * 4, seed=4, max_tokens=16, return_token_ids=True, tools=tools, ignore_eos=True
    )
    texts = []
    with in_thread(create_app(bigram_engine(tokenizer), token=None)) as url:
        async with EngineClient() as client, asyncio.timeout(PATIENCE_S):
            pool = EnginePool(client, [url])
            streamed = (await pool.complete(request, on_text=texts.append)).completion.choices[0]
            whole = (await pool.complete(request)).completion.choices[0]
    assert streamed == whole and texts[-1] == whole.message.content
    assert all(later.startswith(before) for before, later in itertools.pairwise(texts))
    assert len(set(texts)) > 8


async def test_deadline_error_names_the_engines_and_the_last_failure():
    pool = EnginePool(Script(a=lambda: Dirty("half received")), ["a"], deadline_s=0.15, suspect_s=0.02)
    with pytest.raises(DeadlineError, match=r"within 0\.15 s \(engines: a\); last: a: half received"):
        await pool.complete(ask())


async def test_engine_that_misses_a_deadline_is_avoided_for_a_while():
    client = Script(a=lambda: 30.0, b=lambda: None)
    pool = EnginePool(client, ["a", "b"], deadline_s=0.1, suspect_s=60.0)
    with pytest.raises(DeadlineError, match="a had not answered after"):
        await asyncio.wait_for(pool.complete(ask()), SOON_S)
    assert (await pool.complete(ask())).url == "b"
    pool = EnginePool(client, ["a"], suspect_s=60.0)
    running = await begun(pool, ask())
    pool.update(["b"])
    assert (await running).url == "b" and not pool._suspect_until


async def test_waiting_request_uses_an_engine_as_soon_as_it_joins():
    pool = EnginePool(Script(late=lambda: None), deadline_s=PATIENCE_S)
    waiting = await begun(pool, ask())
    pool.update(["late"])
    assert (await waiting).url == "late"


async def test_requests_still_running_on_an_engine_count_as_load_when_that_engine_serves_again():
    may_end = asyncio.Event()
    pool = EnginePool(Script(a=lambda: may_end, b=lambda: None), ["a"])
    old = await begun(pool, ask(n=8))
    pool.update(["b"], finishing=["a"])
    pool.update(["a", "b"])
    assert outstanding(pool._load) == {"a": 43, "b": 0}
    assert (await pool.complete(ask())).url == "b", "it has less to do"
    may_end.set()
    assert (await old).url == "a" and outstanding(pool._load) == {"a": 0, "b": 0}


async def test_request_of_a_removed_engine_moves_to_another_engine_and_keeps_its_seed():
    client, beginnings = Script(a=lambda: 30.0, b=lambda: None), []
    pool = EnginePool(client, ["a"])
    running = await begun(pool, ask(), begun=lambda: beginnings.append(len(client.calls)))
    pool.update(["b"])
    pool.update(["b"])
    assert (await running).url == "b" and client.calls == [("a", 4), ("b", 4)]
    assert beginnings == [0, 1], "each try is a new beginning"
    assert outstanding(pool._load) == {"b": 0}


async def test_answer_of_an_engine_that_restarted_with_initial_weights_is_rejected():
    pool = EnginePool(Script(a=lambda: None), ["a"], deadline_s=0.2, suspect_s=0.05, min_epoch=1)
    with pytest.raises(DeadlineError, match="it serves weights of epoch 0, not those of this run"):
        await pool.complete(ask())


async def test_other_requests_avoid_an_engine_while_it_answers_requests_that_name_it():
    may_end = asyncio.Event()
    client = Script(a=lambda: may_end, b=lambda: 0.0)
    pool = EnginePool(client, ["a", "b"])
    named = [asyncio.create_task(pool.complete(ask(n=8), engine="a")) for _ in range(3)]
    await asyncio.sleep(0)
    others = [await pool.complete(ask()) for _ in range(3)]
    assert {answer.url for answer in others} == {"b"}, "also where its load is the least"
    may_end.set()
    assert [(await answer).url for answer in named] == ["a", "a", "a"]
    assert (await pool.complete(ask(), engine="b")).url == "b"
    assert (await pool.complete(ask())).url == "a", "no unfinished request names it any more"


async def test_request_rejected_by_the_engine_that_it_names_is_not_sent_to_another_engine():
    client = Script(a=lambda: InvalidRequest("too long"), b=lambda: None)
    with pytest.raises(InvalidRequest, match="a: too long"):
        await asyncio.wait_for(EnginePool(client, ["a", "b"]).complete(ask(), engine="a"), SOON_S)
    assert client.calls == [("a", 4)]


async def test_request_that_names_an_engine_runs_while_that_engine_drains_and_fails_when_it_is_removed():
    outcomes = [Overloaded("full"), None]
    pool = EnginePool(Script(a=lambda: outcomes.pop(0), b=lambda: None))
    waiting = await begun(pool, ask(), engine="a")
    pool.update(["b"], finishing=["a"])
    assert (await waiting).url == "a", "tried again on itself alone"
    outcomes.append(60.0)
    running = await begun(pool, ask(), engine="a")
    pool.update(["b"])
    with pytest.raises(EngineUnreachable, match="a, the only engine for this request, is no longer part of the run"):
        await running


async def test_engine_that_renders_prompts_otherwise_than_the_run_is_not_used_and_the_error_names_the_token(tmp_path):
    char_tokenizer().save_pretrained(tmp_path, save_jinja_files=False)
    question = ChatCompletionRequest(messages=[ChatMessage(role="user", content="x")], max_tokens=5)
    right = ChatTokenizer.load(tmp_path).encode_request(question)
    wrong, own = (ANSWER.model_copy(update={"prompt_token_ids": ids}) for ids in ([1, *right], right))
    client = Script(a=lambda: wrong, b=lambda: own)
    pool = EnginePool(client, ["a", "b"], check_prompt=PromptCheck(tmp_path))
    assert [(await pool.complete(question)).url for _ in range(3)] == ["b", "b", "b"]
    pool.update(["a"])
    with pytest.raises(
        InvalidRequest, match=r"a renders prompts otherwise .*: token 0 must be 2 \('<\|user\|>'\), got 1"
    ):
        await pool.complete(question)


async def test_prompt_that_states_yesterdays_date_is_tolerated_once(tmp_path):
    char_tokenizer().save_pretrained(tmp_path, save_jinja_files=False)
    question = ChatCompletionRequest(messages=[ChatMessage(role="user", content="x")], max_tokens=5)
    check = PromptCheck(tmp_path)
    check._day = "yesterday"
    await check("a", question, [1])
    with pytest.raises(InvalidRequest, match="token 0 must be 2"):
        await check("a", question, [1])
