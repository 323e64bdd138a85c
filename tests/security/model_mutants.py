"""Hostile model directories, drawn by a seed: copies of a good directory in which one value or one file is damaged."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable
from typing import Any, Final

#: Invalid or unusual values that replace a value in a configuration file.
_ODD: Final[tuple[Any, ...]] = (
    None, True, False, -1, 0, 1, 2, 3, 10**9, 2**63, 10**40, -(10**9), 0.5, 1e308, float("nan"), float("inf"), "", "x",
    "57", "../x", "/etc/passwd", "\ud800", "\0", "a" * 10_000, [], [[]], {}, {"a": 1}, [0, -1], [10**9] * 3,
    ["full_attention"], {"weight": -1},
)  # fmt: skip
_DEEP: Final = '{"a":' * 50_000
_WORDS: Final = (
    "num_hidden_layers", "vocab_size", "hidden_size", "head_dim", "model_type", "layer_types", "rope_parameters",
    "num_key_value_heads", "num_attention_heads", "dtype", "text_config", "eos_token_id", "quantization_config",
    "intermediate_size", "max_position_embeddings", "hidden_act", "tie_word_embeddings", "architectures", "auto_map",
    "rope_scaling", "sliding_window", "num_experts", "initializer_range", "rms_norm_eps",
)  # fmt: skip


def mutant(original, into, seed):
    """Write a damaged copy of the directory `original` to `into`; return a description of the damage."""
    into.mkdir()
    for file in original.iterdir():
        os.link(file, into / file.name)
    draw = random.Random(seed)
    name, damage = draw.choice(_DAMAGES)
    file = into / name
    before = file.read_bytes() if file.exists() else b"{}"
    after, damage_done = damage(before, draw)
    file.unlink(missing_ok=True)
    file.write_bytes(after)
    return f"seed {seed}: {name}: {damage_done}"


def _value(before, draw):
    """Return the JSON file with one value replaced or one known configuration key set, and describe the change."""
    table = json.loads(before)
    places = [(table, word) for word in _WORDS] if "model_type" in table and draw.random() < 0.5 else []
    holder, key = draw.choice(places or list(_places(table)))
    value = draw.choice(_ODD)
    holder[key] = value
    return json.dumps(table).encode(), f"{key} = {value!r:.60}"


def _lost(before, draw):
    table = json.loads(before)
    holder, key = draw.choice([place for place in _places(table) if isinstance(place[0], dict)])
    del holder[key]
    return json.dumps(table).encode(), f"without {key}"


def _text(before, draw):
    at = draw.randrange(len(before))
    texts = {
        "deep": _DEEP.encode(),
        "deep list": b"[" * 100_000,
        "deep and closed": b"[" * 3_000 + b"]" * 3_000,
        "empty": b"",
        "null": b"null",
        "list": b"[1]",
        "not UTF-8": b'{"a": "\xff"}',
        "cut": before[:at],
        "turned": before[:at] + bytes([before[at] ^ 1 << draw.randrange(8)]) + before[at + 1 :],
        "a huge number": b'{"model_type": ' + b"9" * 6_000 + b"}",
    }
    damage_done = draw.choice(sorted(texts))
    return texts[damage_done], damage_done


def _index(before, draw):
    name = draw.choice(
        ["../model.safetensors", "/etc/passwd", "/dev/zero", "config.json", "", ".", "..", "a\0.safetensors", 3, None,
         "model.safetensors/../../x.safetensors", "absent.safetensors", ["model.safetensors"], "model.safetensors"]
    )  # fmt: skip
    tables = [{"weight_map": {"a": name}}, {"weight_map": name}, {"weight_map": {}}, {}, [name]]
    return json.dumps(draw.choice(tables[:1] * 6 + tables)).encode(), f"index names {name!r}"


def _header(before, draw):
    """Return the safetensors file with a damaged header, and a description of the damage."""
    length = struct.unpack("<Q", before[:8])[0]
    kind = draw.choice(["length", "value", "lost", "text", "cut"])
    if kind == "length":
        other = draw.choice([0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1, len(before)])
        return struct.pack("<Q", other) + before[8:], f"length {other}"
    if kind == "cut":
        return before[: draw.choice([0, 4, 8, 9, length, length + 8, len(before) - 1])], "cut"
    damage: Callable[[bytes, random.Random], tuple[bytes, str]] = {"value": _value, "lost": _lost, "text": _text}[kind]
    header, damage_done = damage(before[8 : 8 + length], draw)
    return struct.pack("<Q", len(header)) + header + before[8 + length :], f"header: {damage_done}"


def _places(tree):
    """Yield the location of each value in a JSON tree, as (containing list or dict, index or key)."""
    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        yield tree, key
        if isinstance(value, dict | list):
            yield from _places(value)


_INDEX: Final = "model.safetensors.index.json"
_DAMAGES: Final = (
    *[("config.json", _value)] * 5, ("config.json", _lost), ("config.json", _text),
    *[("tokenizer.json", _value)] * 3, ("tokenizer.json", _lost), ("tokenizer.json", _text),
    *[("tokenizer_config.json", _value)] * 2, ("tokenizer_config.json", _lost), ("tokenizer_config.json", _text),
    ("generation_config.json", _value), ("generation_config.json", _text),
    (_INDEX, _index), (_INDEX, _index), (_INDEX, _text),
    *[("model.safetensors", _header)] * 3,
)  # fmt: skip
