"""The longest sequences that a model may read in a run, from its configuration alone.

Two kinds of rotary embeddings turn every token by angles that depend on the length of the whole sequence: LongRoPE
(Ding et al. 2024, arXiv 2402.13753: Phi-3.5, Phi-4-mini) and dynamic NTK scaling. Up to the length of pre-training
their angles are constant. Beyond it, each sampled token changes the log-probs of the tokens before it. A cache of keys,
several sequences in a batch, and one pass over a whole answer then have no common right result, so longer sequences are
rejected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

_LONGROPE: Final = frozenset({"longrope", "su"})


def rotary_limit(config: Mapping[str, Any]) -> int | None:
    """Return the most tokens whose rotary angles depend on positions alone, by a text configuration; else None."""
    return min((limit for _, limit in _limits(config)), default=None)


def context_problem(config: Any, path: Path, context_length: int) -> str | None:
    """Return a sentence if `context_length` is too long for the model in `path`, whose configuration is `config`."""
    if isinstance(config, Mapping):
        table, positions = config, config.get("max_position_embeddings")
    else:  # some classes have another name for the number of positions, and map this name to it
        text = config.get_text_config()
        table, positions = text.to_dict(), getattr(text, "max_position_embeddings", None)
    if positions is not None and context_length > positions:
        return f"context_length must be at most the {positions} positions of {path}, got {context_length}"
    kind, limit = min(_limits(table), key=lambda each: each[1], default=("", context_length))
    if context_length <= limit:
        return None
    return (
        f"context_length must be at most {limit}, got {context_length}: in longer texts, the rotary embeddings of "
        f"{path} ({kind}) depend on the text's whole length, so each sampled token would change the log-probs before it"
    )


def _limits(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield pairs (type of rotary embedding, most tokens with constant angles)."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    by_layer_type = [each for each in rope.values() if isinstance(each, Mapping)]
    for settings in by_layer_type or [rope]:
        kind, positions = str(settings.get("rope_type") or settings.get("type")), config.get("max_position_embeddings")
        name = "original_max_position_embeddings"
        limit = settings.get(name) or config.get(name) if kind in _LONGROPE else None
        if (kind in _LONGROPE or "dynamic" in kind) and (limit := limit or positions) is not None:
            yield kind, int(limit)
