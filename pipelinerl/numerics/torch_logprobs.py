"""Log-probs of tokens from hidden states, in torch: softmax in fp32, with the logits computed piece by piece.

The results agree with the definitions in `logprobs`. If a linear head computes in bf16, its weight's gradient is summed
over pieces in fp32: a sum in bf16 loses more with every piece.

`to_fp32` makes the output layer return fp32 logits, in engine and trainer alike: according to the MiniMax-M1 report,
the rounding of logits is the main source of the mismatch. Hidden states and weights keep their dtypes; their products
are summed in fp32 and never rounded to a shorter type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

from pipelinerl.numerics import torch_batch_invariant
from pipelinerl.numerics.dither_torch import rounded
from trainer_contract.types import HeadMeasure, Kernels, Rounding

#: Number of logits held at once, by type of device: 64 MiB in fp32 on a CPU, 512 MiB on a GPU. Pieces are larger on a
#: GPU because each piece reads the weight three times and adds to its gradient. A smaller input is one piece, without
#: recomputation.
LOGITS_AT_ONCE: Final = {"cpu": 2**24, "cuda": 2**27}


def token_predictions(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    token_ids: Tensor,
    temperatures: Tensor | None,
    *,
    vocab_size: int,
    measures: tuple[HeadMeasure, ...] = (),
    logits_at_once: int | None = None,
    compiled: bool = False,
) -> Tensor:
    """Return f32 [1 + M, N]: log-probs of the tokens that the hidden states predict, then M measures.

    With more than `logits_at_once` logits (default: `LOGITS_AT_ONCE`), tokens are processed in pieces, and backward
    recomputes the logits.

    Args:
        hidden: [N, d], at the positions before the tokens.
        head: maps hidden states [n, d] to logits [n, V].
        token_ids: i64 [N].
        temperatures: f32 [N]; None means 1 everywhere.
        vocab_size: V.
        measures: the M measures of each token's distribution to compute, such as its entropy.
        compiled: let torch compile the softmax, which then reads the logits once and keeps no copy of them in fp32.
    """
    predict = _compiled_predictions() if compiled else _predictions
    rows = max(1, (logits_at_once or LOGITS_AT_ONCE[hidden.device.type]) // vocab_size)
    if hidden.shape[0] <= rows:
        return predict(head(hidden), token_ids, temperatures, measures)
    if isinstance(head, nn.Linear) and "forward" not in vars(head):
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        work = _Work(token_ids, temperatures, measures, rows, dtype, predict)
        predictions: Tensor = _LinearHead.apply(hidden, head.weight, head.bias, work)
        return predictions

    def piece(hidden: Tensor, token_ids: Tensor, temperatures: Tensor | None) -> Tensor:
        return predict(head(hidden), token_ids, temperatures, measures)

    pieces = []
    for part in _pieces(hidden.shape[0], rows):
        arguments = (hidden[part], token_ids[part], None if temperatures is None else temperatures[part])
        pieces.append(checkpoint(piece, *arguments, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(pieces, dim=1)


class _Work(NamedTuple):
    """Arguments of `_LinearHead` that receive no gradients."""

    token_ids: Tensor
    temperatures: Tensor | None
    measures: tuple[HeadMeasure, ...]
    rows: int
    dtype: torch.dtype
    predict: Callable[[Tensor, Tensor, Tensor | None, tuple[HeadMeasure, ...]], Tensor]

    def predictions(self, logits: Tensor, part: slice) -> Tensor:
        tempered = None if self.temperatures is None else self.temperatures[part]
        return self.predict(logits, self.token_ids[part], tempered, self.measures)


class _LinearHead(torch.autograd.Function):
    """Log-probs and measures by a linear head, piece by piece. A pass casts the weight once; gradients sum in fp32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, work: _Work) -> Tensor:
        """Return log-probs and M measures of N tokens, f32 [1 + M, N], without keeping logits for backward."""
        ctx.save_for_backward(hidden, weight, bias)
        ctx.work = work
        cast, its_bias = weight.to(work.dtype), None if bias is None else bias.to(work.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            pieces = [
                work.predictions(linear(hidden[part].to(work.dtype), cast, its_bias), part)
                for part in _pieces(len(hidden), work.rows)
            ]
        return torch.cat(pieces, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        hidden, weight, bias = ctx.saved_tensors
        work: _Work = ctx.work
        wants_hidden, wants_weight, wants_bias, _ = ctx.needs_input_grad
        cast, its_bias = weight.to(work.dtype), None if bias is None else bias.to(work.dtype)
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        of_weight = _Sum(weight, work.dtype, weight.device.type) if wants_weight else None
        of_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias else None
        for part in _pieces(len(hidden), work.rows):
            states = hidden[part].to(work.dtype)
            logits = linear(states, cast, its_bias).requires_grad_()
            with torch.enable_grad():
                predictions = work.predictions(logits, part)
            (slope,) = torch.autograd.grad(predictions, logits, slopes[:, part])
            del logits, predictions
            if of_hidden is not None:
                of_hidden[part] = slope @ cast
            if of_weight is not None:
                of_weight.add_product(slope.T, states)
            if of_bias is not None:
                of_bias += slope.sum(0, dtype=torch.float32)
        return of_hidden, None if of_weight is None else of_weight.total, of_bias, None


class _Sum:
    """A sum of matrix products in fp32: a GPU multiplies in `dtype`, a CPU, slow at mixed dtypes, in fp32."""

    def __init__(self, like: Tensor, dtype: torch.dtype, device: str) -> None:
        self.total = torch.zeros_like(like, dtype=torch.float32)
        is_direct = dtype is torch.float32 or device == "cpu"
        self._product = None if is_direct else torch.empty_like(like, dtype=dtype)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        if self._product is None:
            self.total.addmm_(left.float(), right.float())
        else:
            self.total.add_(torch.mm(left, right, out=self._product))


def _pieces(count: int, rows: int) -> Iterator[slice]:
    for start in range(0, count, rows):
        yield slice(start, start + rows)


def _predictions(
    logits: Tensor, token_ids: Tensor, temperatures: Tensor | None, measures: tuple[HeadMeasure, ...]
) -> Tensor:
    logits = logits.float()
    if temperatures is not None:
        logits = logits / temperatures[:, None]
    logprobs = -cross_entropy(logits, token_ids, reduction="none")
    if not measures:
        return logprobs[None]
    normaliser = torch.logsumexp(logits, dim=-1)
    rows = [logprobs]
    for measure in measures:
        if measure is HeadMeasure.MEAN_LOGPROB:
            rows.append(logits.mean(dim=-1) - normaliser)
        else:
            every = logits - normaliser[:, None]  # normaliser − Σ π·logits would suffer cancellation
            rows.append(-(every.exp() * every).sum(dim=-1))
    return torch.stack(rows)


@cache
def _compiled_predictions() -> Callable[[Tensor, Tensor, Tensor | None, tuple[HeadMeasure, ...]], Tensor]:
    # The vocabulary is too large for torch's online softmax; without this option, torch would warn about this.
    return torch.compile(_predictions, dynamic=True, options={"online_softmax": False})


def to_fp32(
    model: Any,
    *,
    served: torch.dtype,
    rounding: Rounding = Rounding.NEAREST,
    kernels: Kernels = Kernels.FAST,
) -> None:
    """Make the output layer of a Hugging Face `model` return fp32 logits for any input dtype.

    Args:
        served: dtype of the weights that engines hold. A trainer's fp32 weights are rounded to this dtype; the gradient
            ignores the rounding (straight-through).
        rounding: the rounding of weights sent to engines.
        kernels: kernels of the output layer's product.
    """
    head = model.get_output_embeddings()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    product = torch_batch_invariant.product if kernels is Kernels.BATCH_INVARIANT else linear
    head.forward = Fp32Head(head, served, rounding, names, product)


class Fp32Head:
    """Forward method of an output layer in fp32. Each call reads the layer's parameters, so they may be replaced."""

    def __init__(
        self,
        layer: Any,
        served: torch.dtype,
        rounding: Rounding,
        names: Mapping[int, str],
        product: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    ) -> None:
        self._layer = layer
        self._product = product
        self._served = served
        self._rounding = rounding
        self._weight_name = names[id(layer.weight)]
        self._bias_name = "" if layer.bias is None else names[id(layer.bias)]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Map hidden states […, d] to logits, f32 […, V]."""
        weight, bias = self._layer.weight, self._layer.bias
        with torch.autocast(hidden.device.type, enabled=False):
            its_bias = None if bias is None else self._exact(bias, self._bias_name)
            return self._product(hidden.float(), self._exact(weight, self._weight_name), its_bias)

    def _exact(self, parameter: Tensor, name: str) -> Tensor:
        if parameter.dtype is torch.float32 and self._served is not torch.float32:
            sent = rounded(parameter.detach(), self._served, self._rounding, name=name)
            # Exact, since the two values differ by less than a factor of two.
            return parameter + (sent.float() - parameter.detach())
        return parameter.float()
