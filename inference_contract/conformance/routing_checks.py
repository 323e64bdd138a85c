"""Checks of `return_routed_experts`; an engine may lack it but must then reject it by name."""

from __future__ import annotations

from typing import Any

from inference_contract.conformance.chat_checks import ids_of
from inference_contract.conformance.session import Session, chunks, refused
from inference_contract.conformance.stream_checks import gathered
from inference_contract.routed_experts import RoutedExperts
from inference_contract.schemas import Choice


def routed_experts_come_or_are_refused(session: Session) -> None:
    """return_routed_experts gives each token the experts of the token before it; or the field is rejected by name."""
    asked: dict[str, Any] = {"n": 2, "seed": 3, "return_routed_experts": True}
    response = session.completed(**asked)
    if response.status_code != 200:
        error = refused(response, 400, code="invalid_request_error")
        assert error["param"] == "return_routed_experts", f"the refusal must name the field, it names {error['param']}"
        return
    whole = session.chat(**asked)
    like = _of_prompt(whole.prompt_token_ids, whole.prompt_routed_experts)
    for choice in whole.choices:
        _of_tokens(choice, like)
    streamed = session.streamed(**asked)
    came = list(chunks(streamed, streamed.iter_lines()))
    _of_prompt(came[0].prompt_token_ids, came[0].prompt_routed_experts)
    for choice in gathered(came):
        parts = [part for chunk in came for part in chunk.choices if part.index == choice.index]
        told = [part.routed_experts for part in parts if part.routed_experts is not None and part.token_ids]
        joined = RoutedExperts.joined(told) if told else None
        _of_tokens(choice.model_copy(update={"routed_experts": joined}), like)
    quiet = session.chat(n=1, seed=3)
    untold = quiet.prompt_routed_experts is None and quiet.choices[0].routed_experts is None
    assert untold, "routed experts must be left out unless return_routed_experts requests them"


def _of_prompt(prompt: list[int] | None, told: RoutedExperts | None) -> RoutedExperts:
    assert prompt, "with return_token_ids the answer must have prompt_token_ids"
    assert told is not None, "with return_routed_experts the answer must have prompt_routed_experts"
    wanted = len(prompt) - 1
    assert told.num_tokens == wanted, f"prompt_routed_experts must cover {wanted} tokens, got {told.num_tokens}"
    return told


def _of_tokens(choice: Choice, like: RoutedExperts) -> None:
    told, wanted = choice.routed_experts, len(ids_of(choice))
    assert told is not None, f"with return_routed_experts choice {choice.index} must have routed_experts"
    assert told.num_tokens == wanted, f"routed_experts must cover {wanted} tokens, got {told.num_tokens}"
    assert told.is_like(like), (
        f"routed_experts must have the same shape everywhere, got {told.shape[1:]} and {like.shape[1:]}"
    )


CHECKS = (routed_experts_come_or_are_refused,)
