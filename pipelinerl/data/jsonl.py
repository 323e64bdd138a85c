"""Problems of a JSONL file: each line an object with `prompt` (text) or `messages`, and `answer`; `metadata` is free.

Without further files, the hash of the prompt splits them. With `held_out_path` or `validation_path` those files are
these splits, and a training line whose prompt occurs in one of them is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from pipelinerl import rng
from pipelinerl.data.drafts import Draft, Split, split_of, to_problem
from pipelinerl.errors import RecipeError
from pipelinerl.types import Message, Problem

_FILES = {Split.TRAIN: "path", Split.VALIDATION: "validation_path", Split.HELD_OUT: "held_out_path"}


@final
class JsonlSource:
    """Training problems come in epochs, each in an order of its own; the others in one order, each once."""

    def __init__(self, problems: tuple[Problem, ...], *, domain: str, split: Split, seed: int) -> None:
        self._problems = problems
        self._domain = domain
        self._split = split
        self._seed = seed
        self._order: tuple[int, list[int]] = (-1, [])  # the epoch last asked for, and its permutation

    @classmethod
    def open(cls, parameters: Mapping[str, Any], *, domain: str, split: Split, seed: int) -> JsonlSource:
        """Read the file or files. Raises `RecipeError` naming file and line."""
        where = f"domains.{domain}"
        unknown = set(parameters) - set(_FILES.values())
        if unknown:
            raise RecipeError(
                f"{where}.parameters: unknown {', '.join(sorted(unknown))}; known: path, held_out_path, …"
            )
        files = {name: _read(_file(parameters, name, where)) for name in {"path", *parameters}}
        chosen = _members(files, split)
        distinct = {draft.messages: draft for draft in chosen}
        if not distinct:
            raise RecipeError(f"{where}: the {split} split of its files is empty; add lines or name a file for it")
        problems = tuple(to_problem(draft, domain) for draft in distinct.values())
        return cls(problems, domain=domain, split=split, seed=seed)

    def __len__(self) -> int:
        return len(self._problems)

    def problem(self, index: int) -> Problem:
        """Problem `index`. Raises `RecipeError` past the end of a validation or held-out split."""
        epoch, place = divmod(index, len(self._problems))
        if epoch and self._split is not Split.TRAIN:
            raise RecipeError(
                f"domains.{self._domain}: the {self._split} split holds {len(self._problems)} problems; ask for fewer"
            )
        if self._order[0] != epoch:
            noise = rng.generator(self._seed, "jsonl", self._split, epoch)
            self._order = (epoch, noise.permutation(len(self._problems)).tolist())
        return self._problems[self._order[1][place]]


def _members(files: Mapping[str, list[Draft]], split: Split) -> list[Draft]:
    """The drafts of one split: its own file's, or those of `path` by hash, without what other splits' files hold."""
    apart = {d.messages for name in set(files) - {"path", _FILES[split]} for d in files[name]}
    if split is Split.HELD_OUT and _FILES[split] in files:
        return files[_FILES[split]]
    if split is Split.VALIDATION and _FILES[split] in files:
        return [d for d in files[_FILES[split]] if d.messages not in apart]
    hashes = {split}
    if (
        split is Split.TRAIN
    ):  # what the hash would set apart for a split with a file of its own is free to be trained on
        hashes |= {other for other, name in _FILES.items() if name in files}
    return [d for d in files["path"] if d.messages not in apart and split_of(d.messages) in hashes]


def _read(path: Path) -> list[Draft]:
    drafts = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    drafts.append(_draft(json.loads(line)))
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise RecipeError(
                        f"{path}:{number}: expected an object with `prompt` or `messages`, and `answer`; "
                        f"{type(error).__name__}: {error}"
                    ) from None
    return drafts


def _draft(record: dict[str, Any]) -> Draft:
    if "messages" in record:
        messages = tuple(Message(str(turn["role"]), str(turn["content"])) for turn in record["messages"])
    else:
        messages = (Message("user", str(record["prompt"])),)
    if not messages:
        raise ValueError("messages is empty")
    return Draft(messages=messages, ground_truth=str(record["answer"]), metadata=dict(record.get("metadata", {})))


def _file(parameters: Mapping[str, Any], name: str, where: str) -> Path:
    """The file that a parameter names. Raises `RecipeError` when it is absent or no file."""
    value = parameters.get(name)
    if not isinstance(value, str) or not Path(value).expanduser().is_file():
        raise RecipeError(f"{where}.parameters.{name} must be the path of a file, got {value!r}")
    return Path(value).expanduser()
