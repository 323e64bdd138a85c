"""Copies of a model directory without its weights: configuration, tokenizer, chat templates, code, licence, model card.

Only files of known kinds are copied. A directory may also hold weights of other frameworks or of other precisions, and
states of optimizers; they would be stale next to trained weights, and double the size of each checkpoint.

A directory from elsewhere may contain links to private files of this machine. Copies of the directory may travel to an
object store, so links are followed only within the directory and to the blobs of the Hugging Face cache. The files that
loading reads in any case may be links to anywhere.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Final

log = logging.getLogger("pipelinerl")

#: Suffixes of files to copy. Files without a suffix, such as LICENSE, are copied too.
_SUFFIXES: Final = frozenset(
    {
        "", ".json", ".jinja", ".py", ".txt", ".md", ".yaml", ".yml",
        ".model", ".tiktoken", ".vocab", ".bpe", ".codes", ".spm",
    }
)  # fmt: skip
#: Files with such a suffix that describe weights or a training state, which the copy replaces.
_REPLACED: Final = ("*.index.json", "manifest.json", "trainer_state.json")
#: Directory of further chat templates, by transformers' convention.
_TEMPLATES: Final = "additional_chat_templates"
#: Files that loading a model reads.
_READ: Final = frozenset(
    {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
        "added_tokens.json", "chat_template.jinja", "chat_template.json",
    }
)  # fmt: skip


def copy_model_files(model: Path, target: Path) -> None:
    """Copy the files of a model directory, except weights, into the directory `target`. Raises OSError."""
    root = model.resolve()
    # A snapshot in the Hugging Face cache consists of links to ../../blobs.
    allowed = [root, *([root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [])]
    for source in [*sorted(model.iterdir()), *sorted((model / _TEMPLATES).glob("*.jinja"))]:
        is_replaced = source.name.startswith(".") or any(source.match(pattern) for pattern in _REPLACED)
        is_known = source.suffix in _SUFFIXES or source.name.startswith("tokenizer.model.")
        if is_replaced or not is_known or not source.is_file():
            continue
        if source.name in _READ or any(source.resolve().is_relative_to(each) for each in allowed):
            copy = target / source.relative_to(model)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(source, copy)
        else:
            log.warning("%s is a link to outside the model directory, so checkpoints do not contain it", source)
