"""API keys and passwords are removed from log lines and error messages."""

import pytest

from pipelinerl.observability.logs import HIDDEN, recipe_without_secrets, table_without_secrets, without_secrets


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
def test_text_that_looks_like_an_api_key_is_redacted(key):
    assert without_secrets(f"AuthenticationError: bad key {key}, see the docs") == (
        "AuthenticationError: bad key [key], see the docs"
    )


def test_bearer_token_is_redacted_and_the_name_of_its_header_is_kept():
    assert without_secrets("authorization: Bearer abcdefghijklmnop.qr") == "authorization: Bearer [key]"


@pytest.mark.parametrize("text", ["step-12 of task-3", "a risk-averse model", "bearer of news", "sk-learn", "hf_hub"])
def test_ordinary_words_are_not_redacted(text):
    assert without_secrets(text) == text


def test_password_in_a_url_is_removed():
    assert without_secrets("redis://user:word@host:1/0") == "redis://host:1/0"
    assert without_secrets("http://host/v1?model=m&api_key=word") == "http://host/v1?model=m&"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"password": "word", "user": "ann"}, {"password": HIDDEN, "user": "ann"}),
        (
            {"HF_TOKEN": "t", "apiKey": "k", "x-api-key": "k"},
            {"HF_TOKEN": HIDDEN, "apiKey": HIDDEN, "x-api-key": HIDDEN},
        ),
        ({"headers": {"Authorization": "Basic x"}}, {"headers": {"Authorization": HIDDEN}}),
        ({"secrets": {"a": ["b", 3, True, ""]}}, {"secrets": {"a": [HIDDEN, HIDDEN, True, ""]}}),
        ({"options": [{"token": 7}]}, {"options": [{"token": HIDDEN}]}),
        ({"command": ["agent", "--api-key", "k", "--n", "3"]}, {"command": ["agent", "--api-key", HIDDEN, "--n", "3"]}),
        ({"command": ["agent", "--token=t"]}, {"command": ["agent", f"--token={HIDDEN}"]}),
        ({"database": "postgres://ann:word@host/db"}, {"database": "postgres://host/db"}),
        ({"max_tokens": 4, "key_variable": "API_KEY"}, {"max_tokens": 4, "key_variable": "API_KEY"}),
    ],
)
def test_secrets_of_a_recipe_are_hidden_by_the_names_of_their_keys(given, shown):
    assert table_without_secrets(given) == shown


def test_text_of_a_recipe_is_shown_with_its_first_comments_and_without_secrets():
    text = '# changed: redis://a:b@host\n[domains.environment_options]\npassword = "word"\nsteps = 3\n'
    assert recipe_without_secrets(text) == (
        f'# changed: redis://host\n[domains.environment_options]\npassword = "{HIDDEN}"\nsteps = 3\n'
    )
    assert recipe_without_secrets('password = "wor') == "(the recipe cannot be read)"
