"""Check that a model directory's chat template renders given messages, in milliseconds and without transformers.

transformers renders with Jinja's sandbox and a few names of its own. Importing it takes seconds and memory, in a
launcher that otherwise needs little. This module renders the same template in the same way. It rejects nothing itself:
if rendering fails, or the directory has several templates, the tokenizer decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pipelinerl.errors import ModelError
from pipelinerl.models.directory_files import json_object
from pipelinerl.models.plain_tokenizer import compiled
from pipelinerl.models.tokenizer import FAILURES, ChatTokenizer
from pipelinerl.types import Message

#: Suffix of the tokenizer_config.json entries, such as `bos_token`, that templates may use.
_TOKEN: Final = "_token"


def refuse_unrenderable(path: Path, messages: Sequence[Message], template_kwargs: Mapping[str, Any]) -> None:
    """Render the conversation by the template of the directory `path`, with the opening of the assistant's turn.

    Raises:
        ModelError: the template fails, or one of its files is damaged.
    """
    if not messages or not _renders(path, messages, template_kwargs):
        ChatTokenizer.load(path).encode_chat(messages, template_kwargs)


def _renders(path: Path, messages: Sequence[Message], template_kwargs: Mapping[str, Any]) -> bool:
    """Return whether the template renders without the library; False leaves the decision to the tokenizer."""
    from jinja2 import TemplateError

    try:
        settings = json_object(path / "tokenizer_config.json")
        own = path / "chat_template.jinja"
        template = own.read_text() if own.is_file() else settings["chat_template"]
        if not isinstance(template, str) or (path / "additional_chat_templates").exists():
            return False
        tokens = {name: value for name, value in settings.items() if name.endswith(_TOKEN) and isinstance(value, str)}
        turns = [{"role": message.role, "content": message.content} for message in messages]
        compiled(template).render(messages=turns, add_generation_prompt=True, **tokens, **template_kwargs)
    except (OSError, ModelError, TemplateError, RecursionError, *FAILURES):
        return False
    return True
