"""Private files: only their owner can ever read them, and they are written completely or not at all."""

import stat

import pytest

from pipelinerl.system.files import write_private


def test_private_file_replaces_a_file_that_everybody_could_read(tmp_path):
    path = tmp_path / "token"
    path.write_text("old")
    path.chmod(0o644)
    write_private(path, "new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_failed_write_of_a_private_file_keeps_the_previous_file(tmp_path):
    path = tmp_path / "token"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_private(path, "half \ud800")
    assert path.read_text() == "old"
