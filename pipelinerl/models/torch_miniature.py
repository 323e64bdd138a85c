"""A miniature of a model: the same architecture with random weights, so shallow and narrow that it runs in a second.

Trainer and engine compare their log-probs on a miniature with those of transformers' own forward. So a model that they
would compute otherwise, or not at all, is rejected without its weights, by `pipelinerl check` and at the start of a
run.

Attention keeps its real widths, because rotary embeddings depend on them. Depth, width of MLPs and experts, vocabulary
and windows shrink; a window is shorter than the texts, so that its effect shows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipelinerl import rng
from pipelinerl.errors import ModelError
from pipelinerl.models.checkpoint import load_structure
from pipelinerl.models.directory_files import foreign_failures
from trainer_contract.errors import SpecError

_VOCAB: Final = 256
_WIDTH: Final = 16
_WINDOW: Final = 4
#: Most layers, and layers of a model whose configuration does not list them: a dense one, and one with experts.
_MOST_LAYERS: Final = 8
_UNLISTED_LAYERS: Final = 2
#: A model whose miniature has more parameters is not tried.
_MOST_PARAMETERS: Final = 10**9

#: Number of random values, a prime.
_PERIOD: Final = 100_003

_DEPTHS: Final = frozenset({"num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"})
_VOCABULARIES: Final = frozenset({"vocab_size", "vocab_size_per_layer_input"})
_WIDTHS: Final = ("intermediate_size", "intermediate_size_mlp", "n_inner", "ffn_dim", "ffn_hidden_size")
_WINDOWS: Final = frozenset({"sliding_window", "attention_chunk_size", "window_size", "attention_window_size"})
#: Numbers of first layers that differ from later ones, and the number of last layers that share keys and values.
_FIRST_LAYERS: Final = frozenset({"first_k_dense_replace", "num_dense_layers", "max_window_layers"})
_SHARING_LAYERS: Final = "num_kv_shared_layers"
#: Token ids, which must lie within the vocabulary if there are any.
_TOKENS: Final = frozenset({"pad_token_id", "bos_token_id", "eos_token_id"})

_TEXTS: Final[Sequence[Sequence[int]]] = (
    (11, 42, 7, 99, 180, 3, 64, 201, 33, 18, 77, 150),
    (11, 42, 7, 99, 23, 250, 61, 8),
    (140, 9, 9, 212, 71),
)
#: Largest difference in nats that rounding in fp32 explains.
_TOLERANCE: Final = 3e-4

#: Sentences about the models tried in this process, by what computed them, class and configuration; "" of no failure.
_TRIED: Final[dict[tuple[str, ...], str]] = {}


class Computed(NamedTuple):
    """A text and what was computed for the last of its tokens: log-probs [n], or hidden states [n, d] of a trunk."""

    text: Sequence[int]
    values: Tensor


#: A computation on a miniature that it may change, such as of `texts_of` it.
Trial = Callable[[PreTrainedModel], Sequence[Computed]]


def refuse_different(skeleton: PreTrainedModel, part: str, compute: Trial) -> bool:
    """Check on a miniature that `compute` gives what transformers' own forward computes.

    Args:
        skeleton: a causal language model or only its trunk; its weights are not used.
        part: the name of what computes, for the message.

    Returns:
        Whether it was tried; False if no miniature of this configuration runs in transformers, or it is too large.

    Raises:
        ModelError: `compute` fails or gives other values.
    """
    name = type(skeleton).__name__
    key = (part, name, skeleton.config.to_json_string(use_diff=False))
    if key not in _TRIED:
        model = miniature(skeleton)
        if model is None and not getattr(skeleton, "_supports_attention_backend", False):
            raise ModelError(f"transformers does not let {name}'s attention be replaced; use another model")
        if model is None:
            return False
        _TRIED[key] = ""
        try:
            _compare(model, part, compute)
        except (ModelError, SpecError) as error:
            _TRIED[key] = str(error)
    if _TRIED[key]:
        raise ModelError(_TRIED[key])
    return True


def _compare(model: PreTrainedModel, part: str, compute: Trial) -> None:
    name = type(model).__name__
    try:
        with foreign_failures(f"{part} cannot compute {name}", "use another model"), torch.no_grad():
            computed = compute(model)
    except ModelError as error:
        if error.__cause__ is None or getattr(model, "_supports_attention_backend", False):
            raise
        raise ModelError(
            f"{part} cannot compute {name}, whose attention this transformers does not let it replace; use another "
            "model or version of transformers"
        ) from error
    errors = [(values - reference(model, text)[-len(values) :]).abs().max() for text, values in computed]
    worst = max(map(float, errors))
    if not worst <= _TOLERANCE:
        raise ModelError(
            f"{part} computes {name} otherwise than transformers: on a small random model of its configuration, "
            f"results differ by up to {worst:.2g}; use another model"
        )


def miniature(skeleton: PreTrainedModel) -> PreTrainedModel | None:
    """Return a random miniature in fp32 on the CPU, without use of the global random state; None if none runs."""
    cls: Any = type(skeleton)
    try:
        with foreign_failures(f"no miniature of {cls.__name__} runs"):
            with torch.device("meta"):
                sizes: PreTrainedModel = cls._from_config(shrunk(skeleton.config), dtype=torch.float32)
            if sum(each.numel() for each in sizes.parameters()) > _MOST_PARAMETERS:
                return None
            with torch.random.fork_rng(devices=[]):
                model: PreTrainedModel = cls._from_config(shrunk(skeleton.config), dtype=torch.float32)
            _fill(model.eval().requires_grad_(False))
            reference(model, texts_of(model)[0])
    except ModelError:
        return None
    return model


def texts_of(model: PreTrainedModel) -> list[list[int]]:
    """Return texts to compute, in the model's vocabulary: longer than a window, and two with the same beginning."""
    vocab = int(model.config.get_text_config().vocab_size)
    return [[token % vocab for token in text] for text in _TEXTS]


def reference(model: PreTrainedModel, text: Sequence[int]) -> Tensor:
    """Return log-probs [T - 1] by transformers' own attention, or of a trunk the last hidden states [T, d]."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output: Any = model(input_ids=torch.tensor([text]), use_cache=False)
    if not hasattr(output, "logits"):
        hidden: Tensor = output.last_hidden_state[0]
        return hidden
    logprobs = output.logits[0].float().log_softmax(-1)[:-1]
    return logprobs.gather(1, torch.tensor(text[1:])[:, None])[:, 0]


def shrunk(config: Any) -> Any:
    """Return a copy of a transformers configuration, and of those inside it, with the sizes of a miniature."""
    small = copy.deepcopy(config)
    for each in _with_inner(small):
        _shrink(each)
    return small


def _with_inner(config: Any) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            yield from _with_inner(value)


def _shrink(config: Any) -> None:
    values = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    depth = next((values[name] for name in _DEPTHS if _is_number(values.get(name))), 0)
    sharing = values.get(_SHARING_LAYERS) or 0
    lists = [each for each in values.values() if isinstance(each, list | tuple) and len(each) == depth > 1]
    kept = _kept(lists, depth, sharing)
    for name, value in values.items():
        if isinstance(value, list | tuple) and len(value) == depth > 1:
            value = [value[index] for index in kept]
            setattr(config, name, value)
        if name.endswith(_WIDTHS):
            narrow = [min(each, _WIDTH) for each in value] if isinstance(value, list) else _at_most(value, _WIDTH)
            setattr(config, name, narrow)
        elif name in _DEPTHS:
            setattr(config, name, _at_most(value, len(kept)))
        elif name in _FIRST_LAYERS:
            setattr(config, name, _at_most(value, 1))
        elif name == _SHARING_LAYERS:
            setattr(config, name, sum(index >= depth - sharing for index in kept))
        elif name in _VOCABULARIES:
            setattr(config, name, _at_most(value, _VOCAB))
        elif name in _WINDOWS:
            setattr(config, name, _at_most(value, _WINDOW))
        elif name in _TOKENS:
            setattr(config, name, 0 if _is_number(value) else None)


def _kept(lists: Sequence[Sequence[Any]], depth: int, sharing: int) -> list[int]:
    """Return the first layer of each kind in `lists`, at least two; the last `sharing` of `depth` layers differ."""
    first: dict[str, int] = {}
    for index in range(depth if lists else 0):
        first.setdefault(repr((index >= depth - sharing, *(each[index] for each in lists))), index)
    kept = sorted(first.values())[:_MOST_LAYERS]
    others = (index for index in range(depth) if index not in kept)
    while len(kept) < min(depth, _UNLISTED_LAYERS):
        kept.append(next(others))
    return sorted(kept)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _at_most(value: Any, most: int) -> Any:
    return min(value, most) if _is_number(value) else value


@torch.no_grad()
def _fill(model: PreTrainedModel) -> None:
    """Give parameters, and stored buffers of zeros, values at which each part of the model changes the output.

    transformers' initial weights are so small that attention is nearly uniform. Values repeat with a period that
    divides no row, which is much faster than drawing each of them.
    """
    pool = torch.empty(_PERIOD).normal_(generator=torch.Generator().manual_seed(rng.key(0, "miniature")))
    starts = count()

    def noise(shape: torch.Size) -> Tensor:
        own = pool.roll(7919 * next(starts))
        return own.repeat(-(-shape.numel() // _PERIOD))[: shape.numel()].view(shape)

    head: Any = model.get_output_embeddings()
    for name, parameter in model.named_parameters():
        values = noise(parameter.shape)
        if parameter.ndim >= 2:
            is_embedding = ("embed" in name or "wte" in name) and (head is None or parameter is not head.weight)
            values *= 1.0 if is_embedding else 1.5 * parameter.shape[-1] ** -0.5
        else:
            values = 0.1 * values + (1.0 if name.endswith("weight") else 0.0)
        parameter.copy_(values)
    stored = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in stored and buffer.is_floating_point() and not buffer.any():
            buffer.copy_(0.1 * noise(buffer.shape))


def trial(key: str, path: Path, refuse: Callable[[PreTrainedModel], bool]) -> Iterator[tuple[str, str]]:
    """Let `refuse` compute a miniature of `path`; yield a warning if it cannot. Raises `ModelError` with `key`."""
    skeleton = load_structure(path, part="trunk" if key == "critic.path" else "causal_lm")
    try:
        tried = refuse(skeleton)
    except ModelError as error:
        raise ModelError(f"{key}: {error}") from error
    if not tried:
        yield (
            "warning",
            f"{key}: no small model of the configuration of {type(skeleton).__name__} runs in transformers, so "
            "engine and trainer are first tried when the run starts",
        )
