"""Checks of a model directory's chat template that load no tokenizer where they need none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pipelinerl.errors import ModelError
from pipelinerl.models.directory_files import json_object
from pipelinerl.models.tokenizer import FAILURES, WITHOUT_TEMPLATE, ChatTokenizer, compiled, entry_of
from pipelinerl.types import Message

#: Suffix of the entries of tokenizer_config.json that templates can read, such as `bos_token`.
_TOKEN: Final = "_token"


def check_chat_template(path: Path) -> None:
    """Raise ModelError if the directory has no chat template, or its tokenizer configuration is damaged."""
    declared = entry_of(path / "tokenizer_config.json", "chat_template")
    if declared is not None and not isinstance(declared, str | list | dict):
        raise ModelError(
            f"chat_template in {path / 'tokenizer_config.json'} must be a text, got {declared!r:.40}; copy it again"
        )
    if not (
        declared is not None
        or (path / "chat_template.jinja").is_file()
        or (path / "additional_chat_templates").is_dir()
    ):
        raise ModelError(WITHOUT_TEMPLATE.format(path))


def refuse_unrenderable(path: Path, messages: Sequence[Message], template_kwargs: Mapping[str, Any]) -> None:
    """Raise ModelError if the template cannot render the messages; the tokenizer decides only if plain Jinja fails."""
    if not messages or not _renders(path, messages, template_kwargs):
        ChatTokenizer.load(path).encode_chat(messages, template_kwargs)


def _renders(path: Path, messages: Sequence[Message], template_kwargs: Mapping[str, Any]) -> bool:
    """Return True if plain Jinja renders the template; False means unknown, so the caller must ask the tokenizer."""
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
