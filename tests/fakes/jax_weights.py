"""Parameters of a JAX model as host arrays under Hugging Face names, gathered one by one as the trainer does."""

import numpy as np

from pipelinerl.plugins.jax.decoder import export_order, export_weight


def exported(config, weights, *, dtype):
    return {
        parameter.name_at(layer or 0): np.array(export_weight(weights, parameter, layer, dtype=dtype))
        for parameter, layer in export_order(config)
    }
