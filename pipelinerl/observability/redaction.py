"""`without_secrets`: text as others than its owner may read it.

Whatever leaves a process as text goes through it: log lines, reports, copies of recipes and events, sentences on
addresses, and what a user's reward function says of an answer. The run's token is never put into a text at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

#: User and password of an address, as they stand before its host, and as redis-py takes them from its query.
_USER_INFO: Final = re.compile(r"""(?<=://)[^/?#\s"']*@""")
_USER_QUERY: Final = re.compile(r"""(?:(?<=[?&])|(?<=&amp;))(?:username|password)=[^&#\s"']*(?:&(?:amp;)?)?""")
#: What looks like a key of a well-known service (OpenAI and those like it, Hugging Face, GitHub, AWS, Slack), or stands
#: behind the word of a header that carries one.
_KEY: Final = re.compile(
    r"\b(?:[sr]k-[\w-]{16,}|hf_\w{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|AKIA[0-9A-Z]{16}|xox[abprs]-[\w-]{10,})"
    r"|(?<=[Bb]earer )[\w.~+/=-]{16,}"
)


def without_secrets(text: str) -> str:
    """Return `text` without users and passwords of addresses, and without what looks like a key."""
    return _KEY.sub("[key]", _USER_QUERY.sub("", _USER_INFO.sub("", text)))


def table_without_secrets(value: Any) -> Any:
    """The same of every text of a table, in lists and tables within it too."""
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, Mapping):
        return {key: table_without_secrets(item) for key, item in value.items()}
    return [table_without_secrets(item) for item in value] if isinstance(value, list | tuple) else value
