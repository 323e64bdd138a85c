"""Checks of `/health`, `/v1/models`, `/metrics` and of authentication."""

from __future__ import annotations

from inference_contract import routes
from inference_contract.conformance.session import NotOffered, Session, refused, succeeded
from inference_contract.schemas import EngineMetrics, EngineState


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


CHECKS = (
    health_is_ready,
    health_needs_no_token,
    other_routes_need_the_token,
    model_card_is_complete,
    metrics_are_prometheus,
    metrics_count_tokens,
)
