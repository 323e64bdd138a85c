"""API keys and passwords are removed from log lines and error messages."""

from __future__ import annotations

import pytest

from pipelinerl.observability.logs import without_secrets


@pytest.mark.parametrize(
    "key",
    [
        "sk-proj-abcdefghijklmnop0123",
        "hf_abcdefghijklmnopqrstuvwx",
        "ghp_abcdefghijklmnopqrstuvwx",
        "AKIAABCDEFGHIJKLMNOP",
        "xoxb-1234567890-abc",
    ],
)
def test_text_that_looks_like_an_api_key_is_redacted(key: str) -> None:
    assert without_secrets(f"AuthenticationError: bad key {key}, see the docs") == (
        "AuthenticationError: bad key [key], see the docs"
    )


def test_bearer_token_is_redacted_and_the_name_of_its_header_is_kept() -> None:
    assert without_secrets("authorization: Bearer abcdefghijklmnop.qr") == "authorization: Bearer [key]"


@pytest.mark.parametrize("text", ["step-12 of task-3", "a risk-averse model", "bearer of news", "sk-learn", "hf_hub"])
def test_ordinary_words_are_not_redacted(text: str) -> None:
    assert without_secrets(text) == text


def test_password_in_a_url_is_removed() -> None:
    assert without_secrets("redis://user:word@host:1/0") == "redis://host:1/0"
