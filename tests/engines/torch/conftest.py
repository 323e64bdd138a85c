"""Fixtures of the torch engine's tests."""

import pytest

from trainer_contract.types import Device


@pytest.fixture(params=[Device.CPU, pytest.param(Device.CUDA, marks=pytest.mark.gpu)])
def device(request):
    """Each device in turn: a test that takes it runs on the CPU, and on a GPU with `-m gpu`."""
    return request.param
