"""A trainer process of rank 1 or higher survives the first SIGTERM, so that rank 0 can save the trainer's state."""

import signal
import subprocess
import sys

import pytest

from tests.patience import PATIENCE_S

RANK = (
    "import sys; from pipelinerl.roles.trainer_rank_role import outlast_notice\n"
    "outlast_notice(float(sys.argv[1])); print('up', flush=True)\n"
    "for line in sys.stdin: print('still here', flush=True)"
)


def rank(save_s):
    words = [sys.executable, "-c", RANK, str(save_s)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    return process


def test_other_trainer_ranks_survive_sigterm_until_rank_0_has_saved():
    process = rank(3600.0)
    output, _ = process.communicate("are you there?\n", timeout=PATIENCE_S)
    assert (output, process.returncode) == ("still here\n", 0)


@pytest.mark.parametrize(("save_s", "again", "status"), [(0.05, False, 143), (3600.0, True, -signal.SIGTERM)])
def test_trainer_rank_ends_after_its_save_deadline_or_a_second_signal(save_s, again, status):
    process = rank(save_s)
    if again:
        process.stdin.write("has the first been heard?\n")
        process.stdin.flush()
        assert process.stdout.readline() == "still here\n"
        process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == status
    process.communicate()
