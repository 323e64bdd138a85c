"""`without_secrets`: text as others than its owner may read it.

Whatever leaves a process as text goes through it: log lines, reports, copies of recipes and events, sentences on
addresses. What is kept secret beside that (the run's token) is never put into a text at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

#: User and password of an address, as they stand before its host, and as redis-py takes them from its query.
_USER_INFO: Final = re.compile(r"""(?<=://)[^/?#\s"']*@""")
_USER_QUERY: Final = re.compile(r"""(?:(?<=[?&])|(?<=&amp;))(?:username|password)=[^&#\s"']*(?:&(?:amp;)?)?""")


def without_secrets(text: str) -> str:
    """Addresses in `text` come out without users and passwords."""
    return _USER_QUERY.sub("", _USER_INFO.sub("", text))


def table_without_secrets(value: Any) -> Any:
    """The same of every text of a table, in lists and tables within it too."""
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, Mapping):
        return {key: table_without_secrets(item) for key, item in value.items()}
    return [table_without_secrets(item) for item in value] if isinstance(value, list | tuple) else value
