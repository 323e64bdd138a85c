"""What tests of several rooms share. Roles configure the logging of their process: a test's gets its own back."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def own_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in list(root.handlers):
        root.removeHandler(handler)
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(False)
