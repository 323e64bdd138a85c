"""`--failures=FILE`: what failed, a line each, its name and its reason with a tab between.

`make test` reads it twice: its last lines name what failed, where the end of a long log is all that somebody sees; and
what failed beside other tests is tried once more, alone.

With `=`, and not a space: before the options of tests/conftest.py are known, a file that is there would be taken for
the only place of tests, and conftest.py never be read.
"""

from __future__ import annotations

from pathlib import Path

import pytest

_LONGEST_REASON = 200


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--failures", type=Path, metavar="FILE", help="write what failed into FILE, with its reason")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """With several test processes only the first one gets here."""
    path: Path | None = config.getoption("--failures")
    if path is None:
        return
    reports = [report for outcome in ("error", "failed") for report in terminalreporter.stats.get(outcome, ())]
    reasons = {report.nodeid: _reason(report) for report in reports}  # one whose end failed as well: once
    path.write_text("".join(f"{name}\t{reason}\n" for name, reason in reasons.items()))


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longreprtext.rstrip().rpartition("\n")[2].removeprefix("E ")
    return " ".join(text.split())[:_LONGEST_REASON]
