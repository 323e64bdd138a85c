"""`pipelinerl warmstart` refuses before it fits anything, and leaves nothing where it refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelinerl.commands.warmstart import WarmStartOptions, make
from pipelinerl.config.recipe import load
from pipelinerl.errors import UserError


def options(**changes: object) -> WarmStartOptions:
    return WarmStartOptions(**{"hidden": 8, "layers": 1, "heads": 2, "band": (0.3, 0.4), "seed": 0, **changes})  # type: ignore[arg-type]


def test_what_exists_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(UserError, match=f"{tmp_path} exists; name a directory to be made"):
        make(load("tiny"), options(), output=tmp_path, say=print)
    assert (tmp_path / "precious").read_text() == "x"


def test_a_shape_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected heads to divide hidden"):
        make(load("tiny"), options(heads=3), output=tmp_path / "new", say=print)
    assert list(tmp_path.iterdir()) == []
