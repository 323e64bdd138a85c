"""Every parameter of a JAX model as host arrays under Hugging Face's names, one by one as trainers gather them."""

import numpy as np

from pipelinerl.models.jax.checkpoint import export_order, export_weight


def exported(config, weights, *, dtype):
    """name → a copy of the parameter."""
    return {
        parameter.name_at(layer or 0): np.array(export_weight(weights, parameter, layer, dtype=dtype))
        for parameter, layer in export_order(config)
    }
