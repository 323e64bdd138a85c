"""The computations of a JAX trainer as pure functions: log-probs, gradient accumulation and AdamW's step.

Each is compiled once per program and row shape. `accumulate` and `step` donate the buffers that they replace (weights,
moments, gradient) to XLA, so memory never holds both their old and new values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.sharding import Mesh, Sharding

from pipelinerl.models.decoder_config import LAYER, VALUE_BIAS, VALUE_WEIGHT, DecoderConfig
from pipelinerl.numerics.dither import PERIOD, phase, thresholds
from pipelinerl.plugins.jax.decoder import hidden_states, layer_weights, output_embedding
from pipelinerl.plugins.jax.logprobs import LOGITS_AT_ONCE, token_predictions
from pipelinerl.plugins.jax.trainer import mesh as jax_mesh
from pipelinerl.plugins.jax.trainer.attention import PADDING, PackedAttention
from pipelinerl.plugins.jax.trainer.options import Remat
from trainer_contract.types import HeadMeasure, HeadPrecision, Objective, OptimizerSpec, measures_of

Weights = dict[str, Array]
#: Columns of a micro-batch by name, laid out as rows [R, C].
Columns = dict[str, Array]

_POLICIES: Final = {
    Remat.MATMULS: jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    Remat.INFERENCE_MATCHED: jax.checkpoint_policies.nothing_saveable,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerProgram:
    """The static configuration of one decoder on one mesh; `compute` is the dtype of forward and backward."""

    config: DecoderConfig
    mesh: Mesh
    compute: Any
    remat: Remat
    attention: PackedAttention = PackedAttention.DENSE
    head: HeadPrecision = HeadPrecision.MODEL
    logits_at_once: int = LOGITS_AT_ONCE

    def fetch(self, own: dict[str, Array]) -> dict[str, Array]:
        """Round a policy's weights as engines do (straight-through), cast them, and gather them over `fsdp`."""
        table = {parameter.name: parameter for parameter in self.config.parameters}
        served, fetched = jnp.finfo(self.config.dtype), {}
        rounds = not self.config.scalar_head and served.bits < jnp.finfo(self.compute).bits
        for name, array in own.items():
            whole = jax_mesh.gathered(self.mesh, table.get(name) or table[LAYER + name])
            if rounds:
                array = array + lax.stop_gradient(lax.reduce_precision(array, served.nexp, served.nmant) - array)
            fetched[name] = lax.with_sharding_constraint(array.astype(self.compute), whole)
        return fetched

    def output_layer(self, weights: Weights) -> Array:
        """Return the output layer's weight [V, D]; `HeadPrecision.FP32` keeps it in fp32."""
        if self.head is HeadPrecision.MODEL:
            return output_embedding(weights, fetch=self.fetch)
        return output_embedding(weights, fetch=replace(self, compute=jnp.float32).fetch)

    def values(self, weights: Weights, hidden: Array) -> Array:
        """Return values f32 [R, C] of hidden states [R, C, D]; always computed in fp32, as in the torch trainer."""
        head = replace(self, compute=jnp.float32).fetch({name: weights[name] for name in (VALUE_WEIGHT, VALUE_BIAS)})
        return jnp.einsum("rcd,od->rc", hidden.astype(jnp.float32), head[VALUE_WEIGHT]) + head[VALUE_BIAS]

    def replayed(self, part: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that backward recomputes all activations except those that the remat policy keeps."""
        return part if self.remat is Remat.NONE else jax.checkpoint(part, policy=_POLICIES[self.remat])

    def wrap(self, layer: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a layer with rematerialisation, and constrain its input and output to the sharding of rows."""
        rows = jax_mesh.of_rows(self.mesh)
        replayed = self.replayed(layer)

        def wrapped(x: Array, inputs: Any) -> tuple[Array, Any]:
            x, state = replayed(lax.with_sharding_constraint(x, rows), inputs)
            return lax.with_sharding_constraint(x, rows), state

        return wrapped

    def divided(self, arrays: Weights) -> Weights:
        """Constrain each array to the sharding of the parameter that has the same name."""
        shardings = {p.name: jax_mesh.of_parameter(self.mesh, p) for p in self.config.parameters}
        return {name: lax.with_sharding_constraint(array, shardings[name]) for name, array in arrays.items()}


def dithered(config: DecoderConfig, weights: Weights) -> Weights:
    """Round f32 weights to the bfloat16 values that engines hold (`numerics.dither`); shardings stay the same."""
    noise = jnp.asarray(thresholds())
    return weights | {
        each.name: _dithered(weights[each.name], noise, each.shape, each.names, weights[each.name].sharding)
        for each in config.parameters
    }


@partial(jax.jit, static_argnums=(2, 3, 4))
def _dithered(array: Array, noise: Array, shape: tuple[int, ...], names: tuple[str, ...], sharding: Sharding) -> Array:
    phases = jnp.asarray([phase(name) for name in names], jnp.int32).reshape(-1, *[1] * len(shape))
    places = jnp.arange(math.prod(shape), dtype=jnp.int32).reshape(1, *shape) + phases
    bits = lax.bitcast_convert_type(array, jnp.int32) + noise[places.reshape(array.shape) % PERIOD]
    return lax.with_sharding_constraint(lax.bitcast_convert_type(bits >> 16 << 16, jnp.float32), sharding)


@partial(jax.jit, static_argnums=0)
def logprobs(program: TrainerProgram, weights: Weights, columns: Columns) -> Array:
    """Return f32 [R, C]: each token's log-prob at its temperature, or value; 0 at segment starts and in padding."""
    return predictions(program, (), weights, columns, columns["segment_ids"] != PADDING)[0]


def predictions(
    program: TrainerProgram,
    measures: tuple[HeadMeasure, ...],
    weights: Weights,
    columns: Columns,
    inside: Array,
    *,
    scan: Callable[..., tuple[Array, Any]] = lax.scan,
) -> Array:
    """Return f32 [1 + M, R, C] for R rows of C tokens: log-probs, then the M `measures`, such as entropy.

    A value model has values instead, and no measures. Results are 0 for tokens outside `inside`, bool [R, C]; most of
    the logits of these tokens are not computed. `scan`, with the arguments of `lax.scan`, runs the layers.
    """
    tokens, positions, segments = (columns[name] for name in ("token_ids", "position_ids", "segment_ids"))
    predicted = inside & (positions > 0)
    with jax.default_matmul_precision("float32"):  # by default, a TPU would multiply fp32 arrays in bf16
        hidden, _ = hidden_states(
            program.config,
            weights,
            tokens,
            positions,
            program.attention.within(segments, program.mesh),
            fetch=program.fetch,
            wrap=program.wrap,
            scan=scan,
        )
        if program.config.scalar_head:
            ahead = program.values(weights, hidden)[None]
        else:
            ahead = _ahead(program, measures, weights, hidden, columns | {"predicted": predicted})
    return jnp.where(predicted, jnp.roll(ahead, 1, axis=2), 0.0)


def _ahead(
    program: TrainerProgram, measures: tuple[HeadMeasure, ...], weights: Weights, hidden: Array, columns: Columns
) -> Array:
    """Return f32 [1 + M, R, C]: at each position, log-prob and M measures of the next token in the row."""
    mesh = program.mesh
    head = partial(
        token_predictions,
        measures=measures,
        logits_at_once=program.logits_at_once * mesh.size,
        row_shards=mesh.shape["data"] * mesh.shape["fsdp"],
    )
    following = (jnp.roll(columns[name], -1, axis=1) for name in ("token_ids", "temperatures", "predicted"))
    return program.replayed(head)(hidden, program.output_layer(weights), *following)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def accumulate(
    program: TrainerProgram, objective: Objective, weights: Weights, gradient: Weights, columns: Columns
) -> tuple[Weights, Array, Array]:
    """Add a micro-batch's gradient to `gradient`; return the sum, the loss, and log-probs or values f32 [R, C].

    With `Remat.INFERENCE_MATCHED`, the backward pass adds each layer's gradient to the donated sum, so memory holds no
    second gradient of the layers.
    """

    inside, measures = columns["loss_mask"], measures_of(objective)
    in_place = program.remat is Remat.INFERENCE_MATCHED
    scan = partial(_scan_into, layer_weights(gradient)) if in_place else lax.scan

    def loss_of(weights: Weights) -> tuple[Array, Array]:
        current, *measured = predictions(program, measures, weights, columns, inside, scan=scan)
        flat = {name: jnp.where(inside, column, 0).reshape(-1) for name, column in columns.items()}
        # Tokens outside the mask, including padding, become zeros in segment 0. In place of the number of segments, the
        # objective gets the number of tokens, an upper bound. It depends only on the shape, so XLA does not compile
        # again if the number of segments changes.
        flat["loss_mask"] = inside.reshape(-1)
        flat |= {name: column.reshape(-1) for name, column in zip(measures, measured, strict=True)}
        return objective.evaluate(current.reshape(-1), flat | {"num_segments": current.size}), current

    (loss, evaluated), added = jax.value_and_grad(loss_of, has_aux=True)(weights)
    total = {
        name: part if in_place and name.startswith(LAYER) else gradient[name] + part for name, part in added.items()
    }
    return program.divided(total), loss, evaluated


def _scan_into(so_far: Weights, layer: Callable[..., Any], x: Array, inputs: tuple[Weights, Any]) -> tuple[Array, None]:
    """Run the layers as `lax.scan` does; backward adds the gradient of their weights to `so_far` in place."""
    return _layers(layer, x, inputs[0], inputs[1], so_far), None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layers(layer: Callable[..., Any], x: Array, weights: Weights, kinds: Any, so_far: Weights) -> Array:
    """Run the layers; `kinds` are what else each of them gets, without a gradient."""
    return lax.scan(layer, x, (weights, kinds))[0]


def _layers_forward(
    layer: Callable[..., Any], x: Array, weights: Weights, kinds: Any, so_far: Weights
) -> tuple[Array, tuple[Array, Weights, Any, Weights]]:
    def recorded(x: Array, inputs: Any) -> tuple[Array, Array]:
        return layer(x, inputs)[0], x

    out, inputs = lax.scan(recorded, x, (weights, kinds))
    return out, (inputs, weights, kinds, so_far)


def _layers_backward(
    layer: Callable[..., Any], saved: tuple[Array, Weights, Any, Weights], outward: Array
) -> tuple[Array, Weights, None, None]:
    inputs, weights, kinds, so_far = saved

    def back(i: Array, state: tuple[Array, Weights]) -> tuple[Array, Weights]:
        outward, total = state
        place = len(inputs) - 1 - i
        own, kind = jax.tree.map(lambda array: array[place], (weights, kinds))
        _, pull = jax.vjp(lambda x, own: layer(x, (own, kind))[0], inputs[place], own)
        outward, added = pull(outward)
        return outward, {name: array.at[place].add(added[name]) for name, array in total.items()}

    with jax.default_matmul_precision("float32"):  # as in `predictions`, whose own context has ended by now
        outward, total = lax.fori_loop(0, len(inputs), back, (outward, so_far))
    return outward, total, None, None


_layers.defvjp(_layers_forward, _layers_backward)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def step(
    program: TrainerProgram,
    spec: OptimizerSpec,
    weights: Weights,
    moments: optax.ScaleByAdamState,
    gradient: Weights,
    learning_rate: Array,
) -> tuple[Weights, optax.ScaleByAdamState, Array]:
    """Clip the gradient by torch's formula, then apply AdamW (Loshchilov and Hutter 2019), without decay of vectors.

    Return new weights and moments, and the norm before clipping. If the norm is not finite, change nothing.
    """
    norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(norm)
    scale = jnp.minimum(1.0, spec.grad_clip / (norm + 1e-6)) if spec.grad_clip else 1.0
    (b1, b2), count = spec.betas, moments.count + 1
    means, squares, applied = {}, {}, {}
    for parameter in program.config.parameters:
        name = parameter.name
        part, mean, square, weight = gradient[name] * scale, moments.mu[name], moments.nu[name], weights[name]
        mean = jnp.where(finite, b1 * mean + (1 - b1) * part, mean)
        square = jnp.where(finite, b2 * square + (1 - b2) * part * part, square)
        # Without this barrier, XLA on a CPU would copy the old moments and compute the update from the copies.
        means[name], squares[name] = mean, square = lax.optimization_barrier((mean, square))
        update = mean / (1 - b1**count) / (jnp.sqrt(square / (1 - b2**count)) + spec.eps)
        if len(parameter.shape) >= 2:
            update += spec.weight_decay * weight
        applied[name] = jnp.where(finite, weight - learning_rate * update, weight)
    after = optax.ScaleByAdamState(jnp.where(finite, count, moments.count), means, squares)
    return program.divided(applied), after, norm


def new_moments(program: TrainerProgram, weights: Weights) -> optax.ScaleByAdamState:
    """Return Adam's initial state, sharded like the weights."""
    count = jax_mesh.everywhere(program.mesh, np.zeros((), np.int32))
    return optax.ScaleByAdamState(count=count, mu=zeros(weights), nu=zeros(weights))


def zeros(weights: Weights) -> Weights:
    """Return a gradient of zeros, in the shapes and shardings of the weights."""
    return {name: jnp.zeros_like(array, device=array.sharding) for name, array in weights.items()}
