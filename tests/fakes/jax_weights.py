"""Parameters of a JAX model as host arrays under Hugging Face names, gathered one by one like a trainer's."""

import numpy as np

from pipelinerl.models.jax.checkpoint import export_order, export_weight


def exported(config, weights, *, dtype):
    """Map each name to a copy of the parameter."""
    return {
        parameter.name_at(layer or 0): np.array(export_weight(weights, parameter, layer, dtype=dtype))
        for parameter, layer in export_order(config)
    }
