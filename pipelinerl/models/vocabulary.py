"""Comparison of the vocabularies of two model directories, by their files alone and without torch.

Critic, reference and teacher compute the token ids that the policy's tokenizer made. A model with fewer tokens fails on
them, and one whose tokens have other ids computes another text, without an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipelinerl.errors import ModelError
from pipelinerl.models.checkpoint import vocab_size
from pipelinerl.models.directory_files import foreign_failures, json_object


class Vocabulary(NamedTuple):
    """The tokens of a tokenizer.json by id, divided into those of its model and those added to it."""

    own: Mapping[int, str]
    added: Mapping[int, str]

    @classmethod
    def of(cls, path: Path) -> Vocabulary:
        """Read a directory's tokenizer.json. Raises ModelError if it is damaged."""
        file = path / "tokenizer.json"
        table = json_object(file)
        with foreign_failures(f"the vocabulary in {file} cannot be read"):
            added = {int(token["id"]): str(token["content"]) for token in table.get("added_tokens") or ()}
            vocab: Any = table["model"]["vocab"]
            listed = vocab.items() if isinstance(vocab, dict) else ((token, id) for id, (token, _) in enumerate(vocab))
            own = {int(id): str(token) for token, id in listed}
        return cls({id: token for id, token in own.items() if id not in added}, added)


def refuse_other_vocabulary(policy: Path, other: Path) -> str:
    """Check that the model in `other` gives the policy's token ids the same meaning.

    Return a warning about added tokens, such as those of a chat template, that `other` lacks or names otherwise; empty
    if there are none.

    Raises:
        ModelError: `other` has too few tokens, or another token at an id of the policy.
    """
    if policy == other:
        return ""
    mine, theirs = Vocabulary.of(policy), Vocabulary.of(other)
    needed = 1 + max([*mine.own, *mine.added], default=-1)
    rows = vocab_size(other)
    if rows is not None and rows < needed:
        raise ModelError(
            f"{other} has a vocabulary of {rows} tokens, and the tokenizer of {policy} makes {needed}; use one with "
            "the same tokenizer"
        )
    all_theirs = {**theirs.own, **theirs.added}
    for id, token in mine.own.items():
        if all_theirs.get(id) != token:
            raise ModelError(
                f"{other} has another tokenizer than {policy}: its token {id} is {_shown(all_theirs.get(id))}, and "
                f"the policy's is {token!r}; use a model with the same tokenizer"
            )
    differ = [(id, token) for id, token in sorted(mine.added.items()) if all_theirs.get(id) != token]
    if not differ:
        return ""
    id, token = differ[0]
    return (
        f"{other} lacks {len(differ)} of the added tokens of {policy} or names them otherwise, first {id}: {token!r}, "
        f"there {_shown(all_theirs.get(id))}; what it computes after them means little"
    )


def _shown(token: str | None) -> str:
    return "absent" if token is None else repr(token)
