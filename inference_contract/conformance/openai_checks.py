"""Checks of optional features: tools, structured output, penalties, biases, `/v1/completions`, routed experts.

An engine may reject any of these, but must name the field.
"""

from __future__ import annotations

import json
from typing import Any, Final

from inference_contract import routes
from inference_contract.completions import TextCompletion
from inference_contract.conformance.chat_checks import check_columns, ids_of, prompt_of
from inference_contract.conformance.session import MESSAGES, Session, checks_of, chunks, refused, succeeded
from inference_contract.conformance.stream_checks import gathered
from inference_contract.routed_experts import RoutedExperts
from inference_contract.schemas import ChatCompletion, ChatCompletionChunk, Choice, FinishReason, TokenLogprob

TOOL: Final = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}
#: Tolerance in nats between log-probs of the same token that come from the same forward pass.
_APART: Final = 1e-3
#: Tolerance in nats between log-probs of the same token from two forward passes, such as a decode step and a prefill.
_SCORED_APART: Final = 0.1


def answered(session: Session, *params: str, **fields: Any) -> ChatCompletion | None:
    """Return the answer to a request; None if the engine rejects a field whose name starts with one of `params`."""
    response = session.completed(**fields)
    if response.status_code == 200:
        return ChatCompletion.model_validate(succeeded(response))
    param = str(refused(response, 400, 422)["param"])
    assert param.startswith(params), f"a refusal must name {' or '.join(params)}, it names {param}"
    return None


def call_and_result(result: str) -> list[dict[str, Any]]:
    """Return two messages: an assistant's call of `TOOL` with null content, and the call's result."""
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": result},
    ]


def tools_are_rendered_or_refused(session: Session) -> None:
    """Offered tools are part of the prompt unless `tool_choice` is "none"; or tools are rejected by name."""
    offered = answered(session, "tools", tools=[TOOL])
    plain = prompt_of(session.chat())
    if offered is None:
        return
    assert len(prompt_of(offered)) > len(plain), "tools must be part of the prompt, or refused by name"
    described = {**TOOL, "function": {**TOOL["function"], "description": "Subtract."}}  # type: ignore[dict-item]
    other = session.chat(tools=[described])
    assert prompt_of(other) != prompt_of(offered), "the description of a tool must be part of the prompt"
    forbidden = session.chat(tools=[TOOL], tool_choice="none")
    assert prompt_of(forbidden) == plain, 'with tool_choice="none" the prompt must be that without tools'


def forced_calls_are_refused(session: Session) -> None:
    """A `tool_choice` that forces a call is obeyed, or rejected by name if the engine cannot guarantee a call."""
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        completion = answered(session, "tool_choice", "tools", tools=[TOOL], tool_choice=choice)
        calls = None if completion is None else completion.choices[0].message.tool_calls
        assert completion is None or calls, f"tool_choice={choice!r} must be kept, or refused by name"


def tool_results_are_rendered_or_refused(session: Session) -> None:
    """Tool calls with null content, and their results, are part of the prompt; or the messages are rejected by name."""
    prompts = []
    for result in ("3", "4"):
        completion = answered(session, "messages", messages=[*MESSAGES, *call_and_result(result)])
        if completion is None:
            return
        prompts.append(prompt_of(completion))
    assert prompts[0] != prompts[1], "the result of a call must be part of the prompt"


def developer_role_is_rendered_or_refused(session: Session) -> None:
    """A message of the role `developer`, OpenAI's newer `system`, is part of the prompt or rejected by name."""
    completion = answered(session, "messages", messages=[{"role": "developer", "content": "Add."}, *MESSAGES])
    assert completion is None or len(prompt_of(completion)) > len(prompt_of(session.chat()))


def response_format_is_enforced_or_refused(session: Session) -> None:
    """An answer with a `response_format` is JSON that satisfies the schema; or the format is rejected by name."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    named = {"name": "answer", "schema": schema}
    for form in ({"type": "json_object"}, {"type": "json_schema", "json_schema": named}):
        completion = answered(session, "response_format", response_format=form, max_tokens=64)
        if completion is None or completion.choices[0].finish_reason is not FinishReason.STOP:
            continue
        answer = json.loads(completion.choices[0].message.content)
        assert isinstance(answer, dict), f"with {form['type']} the answer must be a JSON object"
        if form["type"] == "json_schema":
            assert answer.keys() == {"a"} and isinstance(answer["a"], bool), "the answer must satisfy the schema"


def _top(session: Session, **fields: Any) -> list[TokenLogprob] | None:
    completion = answered(
        session, "top_logprobs", *fields, temperature=0.0, logprobs=True, top_logprobs=8, ignore_eos=True, **fields
    )
    if completion is None:
        return None
    check_columns(completion.choices[0])
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None, "logprobs=true must give choice.logprobs"
    return logprobs.content


def top_logprobs_are_returned_or_refused(session: Session) -> None:
    """`top_logprobs` lists each step's likeliest tokens in order, the greedy one first; or it is rejected by name."""
    records = _top(session)
    for record in records or ():
        values = [each.logprob for each in record.top_logprobs]
        assert 0 < len(values) <= 8, f"top_logprobs=8 must give up to 8 tokens, got {len(values)}"
        assert values == sorted(values, reverse=True), "the likeliest token must come first"
        assert abs(values[0] - record.logprob) < _APART, "the likeliest token must be the greedy one"
    only = answered(session, "top_logprobs", logprobs=True, top_logprobs=3, top_k=1)
    if only is not None and only.choices[0].logprobs is not None:
        records = only.choices[0].logprobs.content
        sure = all(len(each.top_logprobs) == 1 and each.top_logprobs[0].logprob > -_APART for each in records)
        assert sure, "the likeliest tokens must be those of the distribution sampled from: with top_k=1 there is one"


def min_p_is_applied_or_refused(session: Session) -> None:
    """With min_p=1 only the likeliest token remains and its log-prob is 0; or the field is rejected by name."""
    completion = answered(session, "min_p", min_p=1.0)
    if completion is not None:
        worst = min(completion.choices[0].token_logprobs or [0.0])
        assert abs(worst) < _APART, f"with min_p=1 every log-prob must be 0, got {worst}"


def policy_logprobs_are_returned_or_refused(session: Session) -> None:
    """With `policy_logprobs`, top_k=1 leaves one token to sample, whose log-prob is that of the whole distribution at
    the temperature; or the field is rejected by name.
    """
    likeliest = session.chat(temperature=0.0, max_tokens=1, ignore_eos=True).choices[0]
    fields: dict[str, Any] = {"policy_logprobs": True, "max_tokens": 1, "ignore_eos": True}
    reported = []
    for temperature in (1.0, 2.0):
        completion = answered(session, "policy_logprobs", temperature=temperature, top_k=1, **fields)
        if completion is None:
            return
        choice = completion.choices[0]
        assert ids_of(choice) == ids_of(likeliest), "with policy_logprobs, top_k must still drop tokens"
        reported += choice.token_logprobs or []
    expected = (likeliest.token_logprobs or [0.0])[0]  # greedy sampling reports temperature 1
    assert abs(reported[0] - expected) < _APART, (
        f"with policy_logprobs and top_k=1, the likeliest token must have the log-prob of the whole distribution, "
        f"{expected:.4f}, got {reported[0]:.4f}"
    )
    assert reported[1] < reported[0], "with policy_logprobs, log-probs must be those at the request's temperature"
    error = refused(session.completed(policy_logprobs=True, logit_bias={"0": 1.0}), 400, 422)
    assert str(error["param"]).startswith(("policy_logprobs", "logit_bias")), f"param names {error['param']!r}"


def logit_bias_is_applied_or_refused(session: Session) -> None:
    """A bias of 100 forces a token, and log-probs include the bias; or the field is rejected by name."""
    token = ids_of(session.chat(temperature=0.0, max_tokens=1, ignore_eos=True).choices[0])[0]
    for biased in {token, 1}:
        completion = answered(session, "logit_bias", logit_bias={str(biased): 100}, ignore_eos=True, max_tokens=4)
        if completion is None:
            return
        choice = completion.choices[0]
        assert ids_of(choice) == [biased] * 4, (
            f"logit_bias={{{biased}: 100}} must force that token, got {ids_of(choice)}"
        )
        assert min(choice.token_logprobs or [0.0]) > -_APART, "log-probs must include the bias, here 0"
    error = refused(session.completed(logit_bias={str(2**31 - 1): 1.0}), 400, 422)
    assert str(error["param"]).startswith("logit_bias"), f"param must be 'logit_bias', got {error['param']!r}"


def penalties_are_applied_or_refused(session: Session) -> None:
    """A penalty lowers a sampled token's logit like a negative bias of the same size; or it is rejected by name."""
    prompt = prompt_of(session.chat())
    for penalty in ({"presence_penalty": 1.5}, {"frequency_penalty": 1.25}):
        penalized = _top(session, prompt_token_ids=prompt, max_tokens=2, **penalty)
        started = session.chat(prompt_token_ids=prompt, temperature=0.0, max_tokens=1, ignore_eos=True)
        first = ids_of(started.choices[0])
        bias = {str(first[0]): -next(iter(penalty.values()))}
        biased = _top(session, prompt_token_ids=[*prompt, *first], max_tokens=1, logit_bias=bias)
        if penalized is None or biased is None:
            return
        expected, got = (
            {each.token: each.logprob for each in record.top_logprobs} for record in (biased[0], penalized[1])
        )
        both = expected.keys() & got.keys()
        assert len(both) > len(expected) // 2 and all(abs(expected[token] - got[token]) < _APART for token in both), (
            f"with {penalty} the second token must come from {expected}, it came from {got}"
        )


def short_model_name_is_accepted(session: Session) -> None:
    """A request may name the model by the last part of its id, which is a directory."""
    card = session.card()
    assert session.chat(model=card.id.rstrip("/").rpartition("/")[2]).model == card.id


def completions_route_is_served_or_absent(session: Session) -> None:
    """`/v1/completions` gives the same samples as the chat route, for several prompts in order; or it answers 404."""
    prompt = prompt_of(session.chat())
    fields: dict[str, Any] = {"max_tokens": 4, "seed": 5, "return_token_ids": True}
    response = session.post(routes.COMPLETIONS, {"prompt": [prompt, prompt], "n": 2, "logprobs": 0, **fields})
    if response.status_code == 404:
        return
    completion = TextCompletion.model_validate(succeeded(response))
    chat = session.chat(prompt_token_ids=prompt, n=2, **fields)
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3], "two prompts of n=2 must give four choices"
    for place, choice in enumerate(completion.choices):
        twin = chat.choices[place % 2]
        assert choice.token_ids == twin.token_ids, f"choice {place} must be that of the chat route, token for token"
        assert choice.text == twin.message.content, f"choice {place} must have the text of the chat route"
        assert choice.logprobs is not None and choice.logprobs.token_logprobs == choice.token_logprobs
    texts = session.post(routes.COMPLETIONS, {"prompt": ["1 + 2", "3"], "max_tokens": 1, "return_token_ids": True})
    prompts = [choice.prompt_token_ids for choice in TextCompletion.model_validate(succeeded(texts)).choices]
    assert prompts[0] and prompts[1] and prompts[0] != prompts[1], "the prompt must be the text that was sent"
    refused(session.post(routes.COMPLETIONS, {"prompt": "1 + 2", "suffix": "= 3"}), 400, 422, param="suffix")


CHECKS = checks_of(globals())


def routed_experts_are_returned_or_refused(session: Session) -> None:
    """`return_routed_experts` returns experts for the prompt and each new token; or the field is rejected by name."""
    fields: dict[str, Any] = {"n": 2, "seed": 3, "return_routed_experts": True}
    response = session.completed(**fields)
    if response.status_code != 200:
        refused(response, 400, code="invalid_request_error", param="return_routed_experts")
        return
    whole = ChatCompletion.model_validate(response.json())
    like = _of_prompt(whole)
    for choice in whole.choices:
        _of_tokens(choice, like)
    streamed = session.streamed(**fields)
    received = list(chunks(streamed, streamed.iter_lines()))
    _of_prompt(received[0])
    for choice in gathered(received):
        parts = [part for chunk in received for part in chunk.choices if part.index == choice.index]
        routed = [part.routed_experts for part in parts if part.routed_experts is not None and part.token_ids]
        joined = RoutedExperts.joined(routed) if routed else None
        _of_tokens(choice.model_copy(update={"routed_experts": joined}), like)
    quiet = session.chat(n=1, seed=3)
    omitted = quiet.prompt_routed_experts is None and quiet.choices[0].routed_experts is None
    assert omitted, "routed experts must be left out unless return_routed_experts requests them"


def _of_prompt(answer: ChatCompletion | ChatCompletionChunk) -> RoutedExperts:
    routed, expected = answer.prompt_routed_experts, len(prompt_of(answer)) - 1
    assert routed is not None, "with return_routed_experts the answer must have prompt_routed_experts"
    assert routed.num_tokens == expected, f"prompt_routed_experts must cover {expected} tokens, got {routed.num_tokens}"
    return routed


def _of_tokens(choice: Choice, like: RoutedExperts) -> None:
    routed, expected = choice.routed_experts, len(ids_of(choice))
    assert routed is not None, f"with return_routed_experts choice {choice.index} must have routed_experts"
    assert routed.num_tokens == expected, f"routed_experts must cover {expected} tokens, got {routed.num_tokens}"
    assert routed.is_like(like), (
        f"routed_experts must have the same shape everywhere, got {routed.shape[1:]} and {like.shape[1:]}"
    )


def prompt_logprobs_are_returned_or_refused(session: Session) -> None:
    """`return_prompt_logprobs` returns the log-prob of sampling each prompt token; or the field is rejected by name."""
    sampled = session.chat(n=1, seed=5, max_tokens=8, temperature=0.7, ignore_eos=True)
    choice = sampled.choices[0]
    known, logprobs = [*prompt_of(sampled), *ids_of(choice)], choice.token_logprobs or []
    fields: dict[str, Any] = {"n": 1, "prompt_token_ids": known, "max_tokens": 1, "return_prompt_logprobs": True}
    for temperature in (0.7, 1.4):
        scored = answered(session, "return_prompt_logprobs", temperature=temperature, top_k=1, **fields)
        if scored is None:
            return
        got = scored.prompt_logprobs or []
        assert len(got) == len(known), f"prompt_logprobs must have {len(known)} entries, got {len(got)}"
        assert got[0] == 0.0, f"nothing predicts the first token, so its log-prob is 0, got {got[0]}"
        assert max(got) <= _APART, f"log-probs are at most 0, got {max(got)}"
        apart = max(abs(a - b) for a, b in zip(got[-len(logprobs) :], logprobs, strict=True))
        if temperature == 0.7:
            assert apart <= _SCORED_APART, f"sampled tokens must keep their token_logprobs, got {apart:g} nats apart"
        else:
            assert apart > 1e-5, "prompt_logprobs must be those at the request's temperature"
    quiet = session.chat(n=1, seed=5)
    assert quiet.prompt_logprobs is None, "prompt_logprobs must be left out unless return_prompt_logprobs requests them"


#: These checks run after the checks of streams, because they read streams themselves.
ROUTING_CHECKS = checks_of(globals(), but=CHECKS)
