"""Readers of a model directory's files, which may be untrusted; implausible JSON and weights are rejected."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pipelinerl.errors import ModelError
from trainer_contract.errors import SpecError

#: Maximum size in bytes of a JSON file; larger than any known tokenizer.json.
_LONGEST_JSON: Final = 256 << 20
#: Upper bounds of the sizes in config.json; no known model exceeds them.
_SIZES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "num_attention_heads", "n_head"), 1 << 14),
    **dict.fromkeys(("num_key_value_heads", "num_experts", "num_local_experts", "n_routed_experts"), 1 << 14),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "intermediate_size", "n_inner", "head_dim"), 1 << 22),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 1 << 22),
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 30,
    "n_positions": 1 << 30,
}
#: Sizes that may be null or 0 in config.json; their values then follow from other sizes.
_MAY_BE_ABSENT: Final = frozenset(
    {
        "num_key_value_heads", "head_dim", "n_inner", "num_experts", "num_local_experts", "n_routed_experts",
        "moe_intermediate_size", "shared_expert_intermediate_size",
    }
)  # fmt: skip


def json_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ModelError if the file has no object, is too large or too nested."""
    try:
        if file.stat().st_size > _LONGEST_JSON:
            raise ModelError(f"{file} has more than {_LONGEST_JSON >> 20} MiB, which no model needs; copy it again")
        table = json.loads(file.read_text())
    except RecursionError:
        raise ModelError(f"{file} nests its values too deeply to be read; copy it again") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} must be a JSON object: {one_line(error)}; copy it again") from None
    if not isinstance(table, dict):
        raise ModelError(f"{file} must be a JSON object, got {type(table).__name__}; copy it again")
    return table


def text_config(path: Path) -> dict[str, Any]:
    """Return `text_config` of config.json, or all of it. Raises ModelError if unreadable or of implausible sizes."""
    file = path / "config.json"
    whole = json_object(file)
    text = whole.get("text_config") or whole
    if not isinstance(text, dict):
        raise ModelError(f"text_config in {file} must be an object, got {type(text).__name__}; copy it again")
    for name, most in _SIZES.items():
        value = text.get(name, most)
        if not value and not isinstance(value, bool) and name in _MAY_BE_ABSENT:
            continue
        # Some models list a size for each layer.
        for size in value if isinstance(value, list) and value else [value]:
            if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= most:
                raise ModelError(
                    f"{name} in {file} must be a whole number from 1 to {most:,}, got {value!r:.40}; copy it again"
                )
    return text


@contextmanager
def foreign_failures(problem: str, remedy: str = "copy it again") -> Iterator[None]:
    """Convert exceptions that libraries raise on untrusted files to `ModelError`: "problem: library's message; remedy".

    `ModelError` and `SpecError`, which have a remedy already, pass unchanged.

    transformers raises many kinds of exceptions on a damaged config.json. `tokenizers` raises `Exception` itself, or a
    `BaseException` when it panics.
    """
    try:
        yield
    except (ModelError, SpecError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise ModelError(f"{problem}: {one_line(error)}; {remedy}") from error


def one_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class name, to embed in a sentence."""
    message = str(error).partition("\n")[0].strip().rstrip(".;")
    return message[:300] or type(error).__name__


#: Mask of the exponent's bits, by dtype. Values of other dtypes, such as 8-bit ones, are not checked.
_EXPONENTS: Final = {"float32": 0x7F80_0000, "bfloat16": 0x7F80, "float16": 0x7C00, "float64": 0x7FF0 << 48}
#: Number of values per block: small enough that a block stays in a core's cache while two maxima are computed.
_BLOCK: Final = 2**18


def refuse_not_finite(path: Path, name: str, values: NDArray[Any], dtype: str) -> None:
    """Raise ModelError if the values of a parameter of the directory `path` contain NaN or infinity.

    A float is NaN or infinite if all bits of its exponent are set. Read as integers, such values are the largest among
    those of the same sign. Two maxima, one for each sign, therefore find NaN and infinity as fast as memory can be
    read.
    """
    exponent = _EXPONENTS.get(dtype)
    if exponent is None:
        return
    width = values.itemsize
    words, negative = np.ascontiguousarray(values).reshape(-1).view(f"u{width}"), 1 << 8 * width - 1
    for start in range(0, words.size, _BLOCK):
        block = words[start : start + _BLOCK]
        if int(block.view(f"i{width}").max()) >= exponent or int(block.max()) >= negative | exponent:
            raise ModelError(
                f"{path}: the parameter {name} holds NaN or infinite values; copy the model again, or use an earlier "
                "checkpoint"
            )
