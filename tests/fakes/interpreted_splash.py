"""Run JAX's splash kernel on a CPU."""

from functools import partial

import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import make_splash_mha_single_device

from pipelinerl.plugins.jax import splash as jax_splash


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the kernel as XLA operations, because Pallas's interpreter for TPUs fails on kernels under `vmap`."""
    interpreted = partial(make_splash_mha_single_device, interpret=True)
    monkeypatch.setattr(jax_splash, "make_splash_mha_single_device", interpreted)
