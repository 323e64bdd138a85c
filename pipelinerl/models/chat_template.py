"""Does a model directory's chat template render given messages? Told in milliseconds, without transformers.

That library renders with Jinja's sandbox and a few names of its own, and takes seconds to be imported, in a launcher
that then waits for its run in little memory. Here the same template is rendered in the same way. Promises no refusal of
its own: where this rendering fails, or the directory has several templates, the tokenizer itself has the last word.
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

#: What stands in a tokenizer_config.json for templates to write.
_TOKEN: Final = "_token"


def refuse_unrenderable(path: Path, messages: Sequence[Message], template_kwargs: Mapping[str, Any]) -> None:
    """Render the conversation by the template of the directory `path`, the opening of the assistant's turn included.

    Raises:
        ModelError: the template cannot; or a file that it is read from is damaged.
    """
    if not messages or not _renders(path, messages, template_kwargs):
        ChatTokenizer.load(path).encode_chat(messages, template_kwargs)


def _renders(path: Path, messages: Sequence[Message], template_kwargs: Mapping[str, Any]) -> bool:
    """Without the library; False where it must be asked."""
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
