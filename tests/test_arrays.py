"""The module `arrays` has functions that work on numpy, torch and JAX arrays, without importing heavy libraries."""

import numpy as np
import pytest
import torch

from pipelinerl.arrays import namespace, on_host, segment_sum, stop_gradient

VALUES, IDS = [1.0, 2.0, 4.0, 8.0], [0, 0, 2, 2]


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_segment_sum_adds_the_values_of_each_segment(make):
    sums = segment_sum(make(VALUES), make(IDS), 4)
    assert sums.tolist() == [3.0, 0.0, 12.0, 0.0]


def test_array_library_is_recognised_from_an_array_or_an_instance_of_a_subclass():
    assert namespace(np.float32(1.0)) is np
    assert namespace(torch.nn.Parameter(torch.zeros(1))) is torch
    with pytest.raises(TypeError, match=r"expected an array of numpy, torch or jax, got builtins\.list"):
        namespace([1.0])


def test_no_gradient_flows_through_stop_gradient():
    x = torch.tensor([3.0], requires_grad=True)
    (stop_gradient(x) * x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [3.0]
    assert stop_gradient(np.ones(2)).tolist() == [1.0, 1.0]


def test_on_host_returns_a_numpy_array_or_none_for_a_jax_array_that_is_being_traced():
    assert on_host(torch.tensor([1.5, 2.0], requires_grad=True)).tolist() == [1.5, 2.0]
    assert on_host(torch.tensor([True, False])).dtype == on_host(np.array([True])).dtype == bool
    jax = pytest.importorskip("jax")
    seen = []
    assert jax.jit(lambda x: seen.append(on_host(x)) or x)(jax.numpy.ones(2)).tolist() == [1.0, 1.0]
    assert seen == [None] and on_host(jax.numpy.ones(2)).tolist() == [1.0, 1.0]
