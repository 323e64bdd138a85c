"""Episodes of an agent: how each request's messages are matched to earlier turns, and which engine request is made."""

from dataclasses import replace

import numpy as np
import pytest

from inference_contract.errors import InvalidRequest
from inference_contract.tools import FunctionCall, ToolCall
from pipelinerl import rng
from pipelinerl.config.domains import EpisodeSection
from pipelinerl.enums import History
from pipelinerl.plugins.episodes.episode import Episode, NewSegment
from pipelinerl.types import Outcome, Purpose, Sampling, Verdict
from tests.fakes.talking_sampler import completion, order

HELLO = {"role": "user", "content": "hello"}


def answer(text):
    return {"role": "assistant", "content": text}


def user(text):
    return {"role": "user", "content": text}


def episode(**limits):
    return Episode(order(), 0, EpisodeSection(**limits))


def turn(of, messages, text, *, agent="main", **body):
    planned = of.plan(agent, {"messages": messages, **body})
    return of.record(planned, completion(planned.request, text))


def made(of):
    return of.rollout(Verdict(outcome=Outcome.CORRECT, reward=1.0), temperature=0.5)


def segments_of(of):
    """Return, for each segment of the episode's rollout, the numbers of the turns that are trained in that segment."""
    return [list(segment.trained) for segment in made(of).segments]


def begins_of(of):
    return [each.begins for each in made(of).turns]


def test_each_turn_of_a_conversation_continues_the_tokens_of_the_previous_turn():
    of = episode()
    first = turn(of, [HELLO], "a")
    second = turn(of, [HELLO, answer("a"), user("more")], "b")
    third = turn(of, [HELLO, answer("a"), user("more"), answer("b"), user("x"), user("y")], "c")
    assert of.turns == [first, second, third] and third.path == [first, second, third]
    assert segments_of(of) == [[0, 1, 2]] and not made(of).parents
    assert [each.new_segment for each in of.turns] == [NewSegment.FIRST, None, None]
    parts = [ids for each in third.path for ids in (each.turn.context_token_ids, each.turn.token_ids)]
    planned = of.plan("main", {"messages": [HELLO, answer("a"), user("more"), answer("b"), user("x")]})
    assert planned.request.continue_token_ids == np.concatenate(parts[:4]).tolist()
    assert planned.request.continue_from == 4


def test_answer_with_tool_calls_that_is_sent_back_is_matched_to_its_turn_by_call_id():
    of = episode()
    tools = [{"type": "function", "function": {"name": "f"}}]
    planned = of.plan("main", {"messages": [HELLO], "tools": tools})
    answered = completion(planned.request, "f")
    (choice,) = answered.choices
    call = ToolCall(id="abc", function=FunctionCall(name="f", arguments="{}"))
    message = choice.message.model_copy(update={"tool_calls": [call]})
    first = of.record(
        planned, answered.model_copy(update={"choices": [choice.model_copy(update={"message": message})]})
    )
    back = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()], "reasoning_content": "hm"}
    result = {"role": "tool", "content": "3", "tool_call_id": "abc"}
    planned = of.plan("main", {"messages": [HELLO, back, result], "tools": tools})
    assert planned.parent is first and planned.request.messages is not None
    assert planned.request.messages[1].reasoning_content is None
    assert of.plan("main", {"messages": [HELLO, back, result]}).parent is None, (
        "a request with other tools must not continue the answer"
    )


def test_answer_is_not_trained_on_if_the_agent_sends_the_same_request_again():
    of = episode()
    first = turn(of, [HELLO], "a")
    unread = turn(of, [HELLO, answer("a"), user("more")], "lost")
    again = turn(of, [HELLO, answer("a"), user("more")], "b")
    assert of.abandoned == 1 and unread not in of.turns
    assert again.path == [first, again] and segments_of(of) == [[0, 1]]
    of = episode()
    turn(of, [HELLO], "lost")
    turn(of, [HELLO], "a")
    assert begins_of(of) == ["first"], "the answer to a repeated first request"


def test_answer_to_a_repeated_request_is_trained_on_if_a_later_request_continues_it():
    of = episode()
    first, second = turn(of, [HELLO], "a"), turn(of, [HELLO], "b")
    assert of.turns == [second] and of.abandoned == 1
    continuing = turn(of, [HELLO, answer("a"), user("more")], "c")
    assert of.turns == [first, second, continuing] and of.abandoned == 0
    assert segments_of(of) == [[1], [0, 2]] and begins_of(of) == ["first", "forked", ""]


def test_request_that_offers_different_tools_begins_a_new_segment():
    of = episode()
    turn(of, [HELLO], "a")
    turn(of, [HELLO, answer("a"), user("more")], "b", tools=[{"type": "function", "function": {"name": "f"}}])
    assert begins_of(of) == ["first", "tools_differ"]


def test_each_turn_of_a_random_episode_is_trained_in_exactly_one_segment():
    """The test plays a random conversation of two agents with forks, repeated requests and summaries of the history."""
    draw = rng.generator(7, "random episode")
    of = episode(max_turns=200)
    histories = [[HELLO]]
    for number in range(60):
        history = histories[int(draw.integers(len(histories)))]
        text = f"answer {number}"
        turn(of, history, text, agent=("main", "critic")[int(draw.integers(2))])
        histories.append([*history, answer(text), user(f"reply {number % 7}")])
        if number % 9 == 0:
            histories.append([user(f"summary {number}")])
    rollout = made(of)
    assert len(rollout.segments) > 5
    trained = [number for segment in rollout.segments for number in segment.trained]
    assert sorted(trained) == list(range(len(of.turns))), "each turn must be trained in one segment"
    for segment in rollout.segments:
        last = of.turns[segment.trained[-1]]
        tokens = [ids for each in segment.turns for ids in (each.context_token_ids, each.token_ids)]
        np.testing.assert_array_equal(np.concatenate(tokens), last.token_ids)


def test_conversation_stays_one_segment_if_the_chat_template_only_appends_tokens():
    of = episode(history=History.TEMPLATE)
    turn(of, [HELLO], "a")
    planned = of.plan("main", {"messages": [HELLO, answer("a"), user("more")]})
    assert planned.request.continue_token_ids is None
    assert of.record(planned, completion(planned.request, "b")).new_segment is None


def test_new_segment_begins_if_an_earlier_answer_is_rendered_to_other_tokens_than_were_sampled():
    """In the second prompt, the first answer has the token 9 instead of 7 and 8."""
    of = episode()
    seen = [[2, 3], [2, 3, 9, 4, 5, 3]]
    conversations = [[HELLO], [HELLO, answer("ab"), user("c")]]
    for prompt, sampled, messages in zip(seen, ([7, 8, 4], [6, 4]), conversations, strict=True):
        planned = of.plan("main", {"messages": messages})
        answered = completion(planned.request, "ab")
        tokens = {
            "token_ids": sampled, "token_logprobs": [-0.5] * len(sampled), "version_spans": [(1, len(sampled))],
        }  # fmt: skip
        choice = answered.choices[0].model_copy(update=tokens)
        of.record(planned, answered.model_copy(update={"choices": [choice], "prompt_token_ids": prompt}))
    trained = [
        [token for turn in segment.turns for ids in (turn.context_token_ids, turn.token_ids) for token in ids.tolist()]
        for segment in made(of).segments
    ]
    assert trained == [[2, 3, 7, 8, 4], [2, 3, 9, 4, 5, 3, 6, 4]]


def test_agent_cannot_override_sampling_parameters_but_can_lower_the_token_limit():
    of = episode(turn_tokens=8)
    planned = of.plan("main", {"messages": [HELLO], "temperature": 0.0, "top_p": 0.1, "max_tokens": 100, "seed": 3})
    assert (planned.request.temperature, planned.request.top_p, planned.request.max_tokens) == (0.5, 1.0, 8)
    assert of.overridden == {"temperature": 1, "top_p": 1, "seed": 1}
    assert of.plan("main", {"messages": [HELLO], "max_completion_tokens": 2}).request.token_limit == 2


def test_turns_that_are_trained_report_the_policys_logprobs_if_sampling_is_truncated():
    asked = replace(order(), sampling=Sampling(num_samples=1, top_p=0.9))
    evaluated = replace(asked, purpose=Purpose.EVALUATION)
    body = {"messages": [HELLO]}
    assert Episode(asked, 0, EpisodeSection()).plan("main", body).request.policy_logprobs
    for given, trains in ((asked, False), (evaluated, True), (order(), True)):
        assert not Episode(given, 0, EpisodeSection()).plan("main", body, trains=trains).request.policy_logprobs


def test_grammar_of_an_agent_is_rejected_for_turns_that_are_trained():
    body = {"messages": [HELLO], "response_format": {"type": "json_object"}}
    with pytest.raises(InvalidRequest, match="response_format: a grammar changes which tokens are sampled"):
        episode().plan("main", body)
    assert episode().plan("main", body, trains=False).request.response_format is not None
    evaluated = Episode(replace(order(), purpose=Purpose.EVALUATION), 0, EpisodeSection())
    assert evaluated.plan("main", body).request.response_format is not None


def test_sampling_seed_of_an_episode_is_reproducible_and_differs_between_samples_and_agents():
    def seed(sample, agent):
        return Episode(order(), sample, EpisodeSection()).plan(agent, {"messages": [HELLO]}).request.seed

    assert seed(0, "main") == seed(0, "main")
    assert len({seed(0, "main"), seed(1, "main"), seed(0, "critic")}) == 3


def test_episode_ends_if_an_answer_is_cut_at_the_recipes_token_limit_but_not_at_the_agents_limit():
    of = episode(turn_tokens=8)
    turn(of, [HELLO], "abcdefghij", max_tokens=2)
    assert not of.over
    turn(of, [HELLO, answer("ab"), user("more")], "abcdefghij")
    assert "cut at 8 tokens" in of.over


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"n": 2}, "n: an agent reads one answer"),
        ({"continue_token_ids": [1]}, "continue_token_ids: the gateway sets it"),
        ({"policy_logprobs": False}, "policy_logprobs: the gateway sets it"),
        ({"logprobs": True}, "logprobs: must be false"),
        ({"web_search_options": {"a": "b"}}, "web_search_options"),
        ({"messages": []}, "messages"),
    ],
)
def test_forbidden_fields_in_an_agents_request_are_rejected_by_name(body, sentence):
    with pytest.raises(InvalidRequest, match=sentence):
        episode().plan("main", {"messages": [HELLO], **body})
