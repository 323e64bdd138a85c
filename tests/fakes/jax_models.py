"""Parameters of a JAX model as host arrays, and JAX's splash kernel on a CPU."""

from functools import partial

import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import make_splash_mha_single_device

from pipelinerl.plugins.jax import splash as jax_splash
from pipelinerl.plugins.jax.decoder import export_order, export_weight


def exported(config, weights, *, dtype):
    """Return the parameters under Hugging Face names, gathered one by one as the trainer does."""
    return {
        parameter.name_at(layer or 0): np.array(export_weight(weights, parameter, layer, dtype=dtype))
        for parameter, layer in export_order(config)
    }


def interpret(monkeypatch):
    """Run the kernel as XLA operations, because Pallas's interpreter for TPUs fails on kernels under `vmap`."""
    interpreted = partial(make_splash_mha_single_device, interpret=True)
    monkeypatch.setattr(jax_splash, "make_splash_mha_single_device", interpreted)
