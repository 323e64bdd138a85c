"""One task without the others: what it makes, what is imported for it, and what the library is afterwards."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pipelinerl.system import gym_tasks

#: Run in a fresh process: what an import does shows only in one that has imported nothing.
PROGRAM = """
import json, sys
from pipelinerl.system import gym_tasks

def made(create, task):
    dataset = create(task, seed=3, size=9)
    return [dataset[index]["question"] for index in range(2)]

alone = json.loads(sys.argv[1])
ours = {task: made(gym_tasks.create_dataset, task) for task in alone}
found = {"imported": [m for m in sys.modules if m.partition(".")[0] in ("reasoning_gym", "sympy", "matplotlib")]}
ours["syllogism"] = made(gym_tasks.create_dataset, "syllogism")
import reasoning_gym
found["unlike"] = [task for task in ours if ours[task] != made(reasoning_gym.create_dataset, task)]
found["bound"] = reasoning_gym.arithmetic.gcd.GCDDataset is reasoning_gym.factory.DATASETS["gcd"][0]
print(json.dumps(found))
"""


def test_tasks_alone_are_what_the_library_has_and_the_library_stays_whole():
    alone = json.dumps(["spell_backward", "gcd", "leg_counting", "sudoku"])
    done = subprocess.run([sys.executable, "-c", PROGRAM, alone], capture_output=True, text=True, check=True)
    # The module of syllogism is called otherwise: this one comes with the whole library.
    assert json.loads(done.stdout) == {"imported": [], "unlike": [], "bound": True}


@pytest.mark.parametrize("task", ["nothing_of_that_name", "__init__", "../arithmetic/gcd", "gcd*", ""])
def test_what_the_library_does_not_know_it_refuses(task: str):
    with pytest.raises(ValueError, match="not registered"):
        gym_tasks.create_dataset(task)
