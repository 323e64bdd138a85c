"""Checks of `return_routed_experts`; an engine may lack it but must then reject it by name."""

from __future__ import annotations

from typing import Any

from inference_contract.conformance.chat_checks import ids_of
from inference_contract.conformance.session import Session, chunks, refused
from inference_contract.conformance.stream_checks import gathered
from inference_contract.routed_experts import RoutedExperts
from inference_contract.schemas import Choice


def routed_experts_are_returned_or_refused(session: Session) -> None:
    """return_routed_experts gives each token the experts of the token before it; or the field is rejected by name."""
    fields: dict[str, Any] = {"n": 2, "seed": 3, "return_routed_experts": True}
    response = session.completed(**fields)
    if response.status_code != 200:
        error = refused(response, 400, code="invalid_request_error")
        assert error["param"] == "return_routed_experts", f"the refusal must name the field, it names {error['param']}"
        return
    whole = session.chat(**fields)
    like = _of_prompt(whole.prompt_token_ids, whole.prompt_routed_experts)
    for choice in whole.choices:
        _of_tokens(choice, like)
    streamed = session.streamed(**fields)
    received = list(chunks(streamed, streamed.iter_lines()))
    _of_prompt(received[0].prompt_token_ids, received[0].prompt_routed_experts)
    for choice in gathered(received):
        parts = [part for chunk in received for part in chunk.choices if part.index == choice.index]
        routed = [part.routed_experts for part in parts if part.routed_experts is not None and part.token_ids]
        joined = RoutedExperts.joined(routed) if routed else None
        _of_tokens(choice.model_copy(update={"routed_experts": joined}), like)
    quiet = session.chat(n=1, seed=3)
    omitted = quiet.prompt_routed_experts is None and quiet.choices[0].routed_experts is None
    assert omitted, "routed experts must be left out unless return_routed_experts requests them"


def _of_prompt(prompt: list[int] | None, routed: RoutedExperts | None) -> RoutedExperts:
    assert prompt, "with return_token_ids the answer must have prompt_token_ids"
    assert routed is not None, "with return_routed_experts the answer must have prompt_routed_experts"
    expected = len(prompt) - 1
    assert routed.num_tokens == expected, f"prompt_routed_experts must cover {expected} tokens, got {routed.num_tokens}"
    return routed


def _of_tokens(choice: Choice, like: RoutedExperts) -> None:
    routed, expected = choice.routed_experts, len(ids_of(choice))
    assert routed is not None, f"with return_routed_experts choice {choice.index} must have routed_experts"
    assert routed.num_tokens == expected, f"routed_experts must cover {expected} tokens, got {routed.num_tokens}"
    assert routed.is_like(like), (
        f"routed_experts must have the same shape everywhere, got {routed.shape[1:]} and {like.shape[1:]}"
    )


CHECKS = (routed_experts_are_returned_or_refused,)
