"""Environments `verifiers:ID`: tasksets of the library verifiers, played by `verifiers_host.py` in another Python."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pipelinerl.errors import ReferenceFailed

_LOOK_S: Final = 60.0


def host_command(taskset: str, options: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Return the command of the process that plays the taskset's episodes, and the options that it gets."""
    own = {name: value for name, value in options.items() if name != "python"}
    return [options["python"], str(Path(__file__).with_name("verifiers_host.py")), taskset], own


def check_taskset(taskset: str, options: Mapping[str, Any]) -> None:
    """Raise `ReferenceFailed` if the option `python` of a `verifiers:` environment is missing or lacks verifiers."""
    python = options.get("python")
    if not isinstance(python, str) or not os.access(python, os.X_OK):
        raise ReferenceFailed(
            f"verifiers:{taskset} needs environment_options.python, the Python of an environment with verifiers, got "
            f"{python!r}; make one by: python3 -m venv verifiers && verifiers/bin/pip install verifiers"
        )
    look = "import importlib.util as i; raise SystemExit(i.find_spec('verifiers.v1') is None)"
    if subprocess.run([python, "-c", look], capture_output=True, timeout=_LOOK_S, check=False).returncode:
        raise ReferenceFailed(f"{python} has no verifiers of version 0.4; {python} -m pip install 'verifiers>=0.4'")
