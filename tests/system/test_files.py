"""A private file is its owner's only, from its first byte on, and is whole or not there."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from pipelinerl.system.files import sync, write_private


def test_what_is_private_takes_the_place_of_what_everybody_could_read(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("old")
    path.chmod(0o644)
    write_private(path, "new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_private(path, "half \ud800")
    assert path.read_text() == "old"


def test_files_and_directories_are_synced_and_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    sync(tmp_path / "file")
    sync(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync(tmp_path / "other")
