"""The page docs/reference/models.md, made from the records beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "reference" / "models.md"
RECORDS: Final = Path(__file__).with_name("records.json")


def read() -> dict[str, Mapping[str, str]]:
    """Return the records by family."""
    return json.loads(RECORDS.read_text()) if RECORDS.exists() else {}


def write(records: Mapping[str, Mapping[str, str]]) -> None:
    """Write the records."""
    RECORDS.write_text(json.dumps(records, indent=1) + "\n")
