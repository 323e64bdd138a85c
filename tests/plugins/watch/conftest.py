"""One finished run for all tests that only read it."""

import pytest

from tests.plugins.watch.run_files import written_run


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    return written_run(tmp_path_factory.mktemp("finished") / "run", steps=12)
