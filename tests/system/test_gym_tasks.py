"""Importing a single task of reasoning_gym gives the task's usual problems without importing the whole library."""

import json
import subprocess
import sys

import pytest

from pipelinerl.system import gym_tasks

#: A program that compares tasks and lists imported modules. It runs in a new process, in which no library is imported.
PROGRAM = """
import json, sys
from pipelinerl.system import gym_tasks

def made(create, task):
    dataset = create(task, seed=3, size=9)
    return [dataset[index]["question"] for index in range(2)]

alone = json.loads(sys.argv[1])
ours = {task: made(gym_tasks.create_dataset, task) for task in alone}
result = {"imported": [m for m in sys.modules if m.partition(".")[0] in ("reasoning_gym", "sympy", "matplotlib")]}
ours["syllogism"] = made(gym_tasks.create_dataset, "syllogism")
import reasoning_gym
result["unlike"] = [task for task in ours if ours[task] != made(reasoning_gym.create_dataset, task)]
result["bound"] = reasoning_gym.arithmetic.gcd.GCDDataset is reasoning_gym.factory.DATASETS["gcd"][0]
print(json.dumps(result))
"""


def test_separately_imported_reasoning_gym_task_makes_the_same_problems_as_the_whole_library():
    alone = json.dumps(["spell_backward", "gcd", "leg_counting", "sudoku"])
    done = subprocess.run([sys.executable, "-c", PROGRAM, alone], capture_output=True, text=True, check=True)
    # The module of the task syllogism has another name than the task, so making it imports the whole library.
    assert json.loads(done.stdout) == {"imported": [], "unlike": [], "bound": True}


@pytest.mark.parametrize("task", ["nothing_of_that_name", "__init__", "../arithmetic/gcd", "gcd*", ""])
def test_unknown_reasoning_gym_task_is_rejected(task):
    with pytest.raises(ValueError, match="not registered"):
        gym_tasks.create_dataset(task)
