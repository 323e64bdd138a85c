"""Tests that the command of `count.py` counts correctly, and runs as documented."""

import subprocess
import sys

from tests.architecture.count import short_with_one_importer
from tests.architecture.traced_request import files_of_a_request
from tests.architecture.tree import ROOT, Module
from tests.patience import PATIENCE_S

#: The largest number of files that a newcomer may have to open to follow a request through the code.
MOST_OF_A_REQUEST = 17
TREE = (
    Module("launch/a.py", "class A:\n    slots: int\n"),
    Module("launch/b.py", "from launch.a import A\n"),
    Module("launch/c.py", "import launch.b\n"),
    Module("launch/d.py", "import launch.b\n"),
)


def test_short_file_with_one_importer_is_found_in_a_small_source_tree():
    assert list(short_with_one_importer(TREE)) == [("launch/a.py", 2, "launch/b.py")]


def test_architecture_count_command_prints_a_heading_for_each_count():
    command = [sys.executable, "-m", "tests.architecture.count"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert answer.returncode == 0, answer.stderr
    for heading in ("product:", "core:", "tests:", "of code per class", "one importer:", "folders:"):
        assert heading in answer.stdout


def test_one_engine_request_runs_handler_decoding_and_sampling_code_of_at_most_17_files():
    """The trace covers both threads, and omits files used only to start or update an engine."""
    files = files_of_a_request()
    assert {
        "pipelinerl/engines/http/server.py",
        "pipelinerl/engines/batching/decode_loop.py",
        "pipelinerl/engines/torch/sampling.py",
    } <= set(files)
    assert not {"pipelinerl/models/checkpoint.py", "pipelinerl/engines/weights/incoming_update.py"} & set(files)
    assert len(files) <= MOST_OF_A_REQUEST
