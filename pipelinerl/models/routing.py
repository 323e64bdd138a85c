"""Mixture-of-experts models by their config.json, without torch.

A layer's router chooses `top_k` experts for each token. The trainer can replay a sampler's choice only if it knows the
router's arithmetic: a softmax over all experts, of which the chosen ones keep their weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pipelinerl.errors import ModelError
from pipelinerl.models.checkpoint import model_type
from pipelinerl.models.directory_files import text_table
from trainer_contract.types import RoutingShape

#: Model types whose routing the torch engine records and the torch trainer replays (`torch_routers`).
REPLAYED: Final = frozenset({"mixtral", "olmoe", "qwen2_moe", "qwen3_moe"})
#: A matrix of one expert in a model's files; Mixtral numbers them.
_OF_EXPERT: Final = re.compile(
    r"(?P<experts>.*\.experts)\.(?P<number>\d+)\.(?P<matrix>gate_proj|up_proj|down_proj|w1|w2|w3)\.weight"
)
_DOWN: Final = ("down_proj", "w2")
#: Names of the number of experts per layer in configurations.
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def mixture_of(path: Path) -> RoutingShape | None:
    """Return the routers of the model in a directory, by its config.json; None for a model without expert layers.

    Raises:
        ModelError: the configuration cannot be read or is incomplete.
    """
    where = path / "config.json"
    try:
        text = text_table(where)
        experts = next((int(text[name]) for name in _EXPERTS if text.get(name)), 0)
        layers = _layers(text) if experts > 1 else 0
        return RoutingShape(layers, experts, int(text["num_experts_per_tok"])) if layers else None
    except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(
            f"the experts of the model in {path} cannot be read from {where.name}: {error!r}; copy it again"
        ) from None


def replayed_routing(path: Path) -> RoutingShape:
    """Return the routers of a model whose choice can be recorded and replayed.

    Raises:
        ModelError: the model has no routers, or unsupported ones.
    """
    shape, kind = mixture_of(path), model_type(path)
    if shape is None:
        raise ModelError(f"the model in {path}, of type {kind!r}, has no experts whose routing could be replayed")
    if kind not in REPLAYED:
        raise ModelError(
            f"routing can be replayed for {', '.join(sorted(REPLAYED))}, not for the routers of {kind!r} in {path}"
        )
    return shape


def fused_experts(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Convert a directory's shapes by name to those of a loaded model, in which a layer's experts are two parameters.

    Files name each expert's matrices, `….experts.3.gate_proj.weight`. The loaded parameters, which are trained,
    gathered and sent, are `gate_up_proj` [experts, 2 · width, hidden] and `down_proj` [experts, hidden, width].
    """
    fused: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        found = _OF_EXPERT.fullmatch(name)
        if found is None:
            fused[name] = shape
            continue
        target = f"{found['experts']}.{'down_proj' if found['matrix'] in _DOWN else 'gate_up_proj'}"
        experts = max(fused.get(target, (0,))[0], int(found["number"]) + 1)
        rows, columns = shape
        fused[target] = (experts, rows if found["matrix"] in _DOWN else 2 * rows, columns)
    return fused


def _layers(text: Mapping[str, Any]) -> int:
    """Return the number of layers with experts; other layers have one MLP for all tokens."""
    kinds = text.get("mlp_layer_types")
    if kinds is not None:
        return sum(kind == "sparse" for kind in kinds)
    every, dense = int(text.get("decoder_sparse_step") or 1), set(text.get("mlp_only_layers") or ())
    first = int(text.get("first_k_dense_replace") or 0)
    layers = range(int(text["num_hidden_layers"]))
    return sum(layer >= first and layer not in dense and (layer + 1) % every == 0 for layer in layers)
