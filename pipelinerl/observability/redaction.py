"""Removal of secrets from text that others than its owner may read.

All text that leaves a process passes through here: log lines, reports, copies of recipes and events, messages with
addresses, and texts of a user's reward function. The run's token is never put into any text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

#: User and password before the host of an address, and in its query, where redis-py also accepts them.
_USER_INFO: Final = re.compile(r"""(?<=://)[^/?#\s"']*@""")
_USER_QUERY: Final = re.compile(r"""(?:(?<=[?&])|(?<=&amp;))(?:username|password)=[^&#\s"']*(?:&(?:amp;)?)?""")
#: Text that looks like a key of a well-known service (OpenAI and similar, Hugging Face, GitHub, AWS, Slack), or that
#: follows `Bearer` in a header.
_KEY: Final = re.compile(
    r"\b(?:[sr]k-[\w-]{16,}|hf_\w{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|AKIA[0-9A-Z]{16}|xox[abprs]-[\w-]{10,})"
    r"|(?<=[Bb]earer )[\w.~+/=-]{16,}"
)


def without_secrets(text: str) -> str:
    """Return `text` without users and passwords in addresses and without anything that looks like a key."""
    return _KEY.sub("[key]", _USER_QUERY.sub("", _USER_INFO.sub("", text)))


def table_without_secrets(value: Any) -> Any:
    """Return `value` with every text in it redacted, including those in nested lists and tables."""
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, Mapping):
        return {key: table_without_secrets(item) for key, item in value.items()}
    return [table_without_secrets(item) for item in value] if isinstance(value, list | tuple) else value
