"""Checks of `/health`, `/v1/models`, `/metrics`, authentication, and the rejection of invalid requests by name.

A rejection has OpenAI's error shape and does not repeat the input.
"""

from __future__ import annotations

from inference_contract import routes
from inference_contract.conformance.chat_checks import check_columns
from inference_contract.conformance.session import NotOffered, Session, checks_of, refused, succeeded
from inference_contract.schemas import (
    LEAST_TEMPERATURE,
    LEAST_TOP_P,
    MOST_PRIORITY,
    MOST_TOP_K,
    ChatCompletion,
    EngineMetrics,
    EngineState,
)


def health_is_ready(session: Session) -> None:
    """GET /health reports that the engine is ready."""
    health = session.health()
    assert health.state is EngineState.READY, f"the engine must be ready, it is {health.state}"


def health_needs_no_token(session: Session) -> None:
    """GET /health answers without a token."""
    succeeded(session.without_token(routes.HEALTH))


def other_routes_need_the_token(session: Session) -> None:
    """Without the right token every other route answers 401."""
    if session.token is None:
        raise NotOffered("the engine is served without a token")
    for path in (routes.MODELS, routes.METRICS):
        refused(session.without_token(path), 401, code="unauthorized")


def model_card_is_complete(session: Session) -> None:
    """GET /v1/models names the model, its version and the layout required of updates."""
    card, health = session.card(), session.health()
    assert card.id, "the model must have an id"
    assert card.layout_id == card.layout.layout_id, "layout_id must be the digest of the layout"
    assert (card.epoch, card.model_version) == (health.epoch, health.model_version), (
        "/v1/models and /health must name the same weights"
    )
    assert card.context_length > 1, "context_length must leave room for a prompt and a token"


def metrics_are_prometheus(session: Session) -> None:
    """GET /metrics prints every field of EngineMetrics in Prometheus' text format."""
    response = session.get(routes.METRICS)
    assert response.status_code == 200, f"/metrics must answer 200, got {response.status_code}"
    samples = dict(line.rsplit(" ", 1) for line in response.text.splitlines() if line and not line.startswith("#"))
    for name in EngineMetrics.model_fields:
        values = [value for sample, value in samples.items() if sample.split("{")[0].endswith(name)]
        assert values, f"/metrics must have a sample whose name ends in {name!r}"
        float(values[0])


def metrics_count_tokens(session: Session) -> None:
    """generated_tokens_total grows by the number of sampled tokens."""
    before = session.generated_tokens()
    sampled = session.chat(n=2).usage.completion_tokens
    grown = session.generated_tokens() - before
    assert grown == sampled, f"generated_tokens_total must grow by the {sampled} tokens sampled, it grew by {grown:g}"


STATE_CHECKS = checks_of(globals())

# --- refusals ---------------------------------------------------------------------------------------------------------

_SECRET = "do-not-repeat-me-4711"


def unknown_field_is_refused(session: Session) -> None:
    """An unknown field is rejected by name, never ignored."""
    refused(session.completed(frobnicate=1), 400, 422, param="frobnicate")


def wrong_type_is_refused(session: Session) -> None:
    """A field of the wrong type is rejected by its path, and its value is not repeated."""
    response = session.completed(max_tokens=_SECRET)
    refused(response, 400, 422, param="max_tokens")
    assert _SECRET not in response.text, "an error must not repeat the input"
    nested = refused(session.completed(messages=[{"role": "user", "content": 3}]), 400, 422)
    assert str(nested["param"]).startswith("messages"), f"param must be a path below messages, got {nested['param']!r}"


def out_of_range_is_refused(session: Session) -> None:
    """Values outside their range are rejected by name."""
    beyond = (
        *(("temperature", -1.0), ("temperature", 1e-38), ("top_p", 0.0), ("top_p", 1e-46), ("top_k", MOST_TOP_K + 1)),
        *(("top_k", 2**63), ("n", 0), ("max_tokens", 0), ("stop", ""), ("priority", 2**31)),
    )
    for name, value in beyond:
        error = refused(session.completed(**{name: value}), 400, 422)
        assert error["param"] == name, f"{name}={value}: param must be {name!r}, got {error['param']!r}"
    session.chat()


def extreme_values_are_served_or_refused(session: Session) -> None:
    """The least and greatest allowed values of fields are served; a field that the engine lacks is rejected by name."""
    edges = (
        *(("temperature", LEAST_TEMPERATURE), ("top_p", LEAST_TOP_P), ("top_k", MOST_TOP_K)),
        *(("priority", -MOST_PRIORITY), ("priority", MOST_PRIORITY)),
    )
    for name, value in edges:
        answer = session.completed(**{name: value})
        if answer.status_code in (400, 422):
            param = refused(answer, 400, 422)["param"]
            assert param == name, f"{name}={value}: param must be {name!r}, got {param!r}"
        else:
            check_columns(ChatCompletion.model_validate(succeeded(answer)).choices[0])
    session.chat()


def missing_prompt_is_refused(session: Session) -> None:
    """A request with neither messages nor prompt_token_ids is rejected."""
    refused(session.post(routes.CHAT_COMPLETIONS, {"max_tokens": 4}), 400, 422)


def malformed_body_is_refused(session: Session) -> None:
    """A body that is not JSON is rejected and not repeated."""
    response = session.post(routes.CHAT_COMPLETIONS, f'{{"messages": {_SECRET}'.encode())
    refused(response, 400, 422)
    assert _SECRET not in response.text, "an error must not repeat the input"


def too_long_prompt_is_refused(session: Session) -> None:
    """A prompt that leaves no room for a token is rejected with 400, OpenAI's error code and the field's name."""
    response = session.completed(prompt_token_ids=[1] * session.card().context_length)
    refused(response, 400, code="context_length_exceeded", param="prompt_token_ids")


def token_outside_vocabulary_is_refused(session: Session) -> None:
    """Token ids outside the vocabulary are rejected."""
    for token_id in (-1, 2**31 - 1):
        error = refused(session.completed(prompt_token_ids=[1, token_id]), 400, 422)
        assert "prompt_token_ids" in str(error["param"]), f"param must be prompt_token_ids, got {error['param']!r}"


def unknown_model_is_refused(session: Session) -> None:
    """A request for another model is rejected with 404."""
    refused(session.completed(model="no-such-model"), 404, code="model_not_found")


def refused_stream_gets_a_plain_error(session: Session) -> None:
    """A rejected streaming request gets a plain error response, not a stream."""
    refused(session.streamed(prompt_token_ids=[1] * session.card().context_length), 400)


def unknown_route_and_method_are_refused(session: Session) -> None:
    """An unknown route answers 404 and a wrong method 405, both in OpenAI's error shape."""
    refused(session.get("/v1/no-such-route"), 404)
    refused(session.get(routes.CHAT_COMPLETIONS), 405)


REFUSAL_CHECKS = checks_of(globals(), but=STATE_CHECKS)
