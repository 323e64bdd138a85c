"""JAX's memory limit is set under a name that JAX reads, and the user's own setting stays."""

from __future__ import annotations

import pytest

from pipelinerl.models.jax import memory as jax_memory


@pytest.mark.parametrize(
    ("before", "share", "asked_of_xla"),
    [
        ({}, 0.45, 0.45),
        ({}, None, None),
        ({"XLA_CLIENT_MEM_FRACTION": "0.3"}, 0.45, 0.3),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.2"}, 0.45, 0.2),
    ],
)
def test_memory_share_reaches_xla(
    before: dict[str, str], share: float | None, asked_of_xla: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    xla_client = pytest.importorskip("jaxlib.xla_client")
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it
        monkeypatch.delenv(name)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    jax_memory.bound(share)
    assert xla_client.generate_pjrt_gpu_plugin_options().get("memory_fraction") == asked_of_xla
