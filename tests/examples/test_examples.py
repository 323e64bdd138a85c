"""Tests of `examples/`: each recipe runs unchanged except for fewer steps, and `README.md` there names each recipe."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from benchmarks.games import guessing
from pipelinerl.config.recipe import load
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.plugins.warmstart.tiny_decoder import char_tokenizer
from pipelinerl.roles.problems import held_out_problems, training_problems
from tests.fakes.live_run import CLI, launched
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
RECIPES = sorted({*EXAMPLES.rglob("*.toml")} - {*EXAMPLES.glob("verifier_package/*")})  # test_verifier_package.py


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_example_has_one_recipe_and_disjoint_held_out_problems(recipe):
    config = load(recipe)
    assert len(list(recipe.parent.glob("*.toml"))) == 1
    assert len([path for path in recipe.parent.glob("*.py") if path.name != "fetch_model.py"]) <= 1
    assert recipe.parent.name in (EXAMPLES / "README.md").read_text()
    training, held_out = training_problems(config), held_out_problems(config)[config.evaluation_sets[0].name]
    assert not {training.problem(index).problem_id for index in range(200)} & {
        held_out.problem(index).problem_id for index in range(config.evaluation.problems)
    }


def test_files_of_the_own_reward_example_equal_the_code_blocks_of_the_rewards_docs_page():
    blocks = re.findall(r"```\w+\n(.*?)```", (ROOT / "docs" / "start" / "rewards.md").read_text(), re.DOTALL)
    files = [(EXAMPLES / "own_reward" / name).read_text() for name in ("rewards.py", "words.toml")]
    assert blocks[:2] == files, "tests/end_to_end/test_own_reward.py runs the page's"


def test_multi_turn_game_example_trains(tmp_path):
    """The run takes only two steps; a slow test shows that the model learns the game."""
    recipe = EXAMPLES / "guess_letter" / "guess_letter.toml"
    quick = (f"run.directory={tmp_path}", "run.steps=2", "training.rollouts_per_step=32", "evaluation.problems=4")
    with launched([str(recipe), *guessing(tmp_path / "model"), *quick], tmp_path / "guess_letter") as run:
        assert run.end() == 0, run.story()
        steps, evaluations = run.events("step"), run.events("evaluation")
    assert len(steps) == 2 and evaluations
    assert steps[-1]["unjudged"] == 0 and 0 < steps[-1]["reward"] < 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "package"),
    [("command", "json"), ("openai_agents", "agents"), ("litellm_agent", "litellm"),
     ("langchain_agent", "langchain_openai")],
)  # fmt: skip
def test_example_whose_agent_uses_another_framework_trains(name, package, tmp_path):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"left out: needs the package {package}; examples/README.md says how to install it")
    recipe = EXAMPLES / "agents" / name / f"{name}.toml"
    quick = (f"run.directory={tmp_path}", "run.steps=2", "training.rollouts_per_step=16", "evaluation.problems=0")
    with launched([str(recipe), *quick], tmp_path / name) as run:
        assert run.end(300) == 0, run.story()
        figures = run.events("step")[-1]["by_domain"]["backward"]
    assert (figures["turns"], figures["segments"], figures["unjudged"]) == (2, 1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["openenv", "verifiers_taskset"])
def test_example_whose_environment_needs_another_python_installation_trains(name, tmp_path):
    variable = {"openenv": "OPENENV_PYTHON", "verifiers_taskset": "VERIFIERS_PYTHON"}[name]
    if (python := os.environ.get(variable)) is None:
        pytest.skip(f"left out: {variable} must name a Python that has the package; docs/start/environments.md")
    folder = EXAMPLES / "agents" / name
    quick = [f"run.directory={tmp_path}", "run.steps=2", "training.rollouts_per_step=16", "evaluation.problems=0"]
    quick += [f"domains.backward.environment_options.python={python}"] if name == "verifiers_taskset" else []
    server = subprocess.Popen([python, "server.py"], cwd=folder) if name == "openenv" else None
    try:
        with launched([str(folder / f"{name}.toml"), *quick], tmp_path / name) as run:
            assert run.end(300) == 0, run.story()
            figures = run.events("step")[-1]["by_domain"]["backward"]
    finally:
        if server is not None:
            server.terminate()
            server.wait(PATIENCE_S)
    assert figures["turns"] == {"openenv": 2, "verifiers_taskset": 1}[name] and figures["unjudged"] == 0


def test_json_facts_task_has_one_reward_for_right_values_and_one_for_answers_that_can_be_parsed():
    config = load(EXAMPLES / "smollm2" / "json_facts.toml")
    problem = training_problems(config).problem(0)
    truth = json.loads(problem.ground_truth)
    assert list(truth) == ["who", "other", "item", "count"] and truth["who"] != truth["other"]
    assert all(truth[who] in problem.messages[-1].content for who in ("who", "other"))
    script = (
        "import json, task\n"
        f"truth = {problem.ground_truth!r}\n"
        "said = json.loads(truth)\n"
        "assert (task.parses(truth), task.right(truth, truth)) == (1, 1)\n"
        "assert round(task.right(json.dumps(said | {'count': 1}), truth), 3) == 0.75\n"
        "assert task.right(json.dumps(said | {'more': 1}), truth) == task.right('It is 3.', truth) == 0\n"
        "assert task.parses('[1]') == task.parses('{') == task.parses('[' * 100_000) == 0\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=EXAMPLES / "smollm2", check=True, timeout=PATIENCE_S)


_AGENT = """
import asyncio, sys
from types import SimpleNamespace as Answer
import agent

class Client:
    def __init__(self, *answers):
        self.answers, self.seen = list(answers), []
    async def chat(self, messages, tools):
        self.seen = [message if isinstance(message, dict) else {} for message in messages]
        return self.answers.pop(0)

def call(expression, name="calculator"):
    function = {"name": name, "arguments": '{"expression": "' + expression + '"}'}
    return Answer(content="", tool_calls=[{"id": "1", "function": function}])

def reward(*answers):
    client = Client(*answers)
    task = Answer(messages=[], ground_truth="713")
    return asyncio.run(agent.run(task, client)), client.seen[-1].get("content") if client.seen else None

def text(content):
    return Answer(content=content, tool_calls=[])

assert reward(text("713")) == (0.0, None), "an answer without a call earns nothing"
assert reward(call("23 * 31", name="division"), text("1")) == (0.1, "error: no such tool")
assert reward(call("23 * 31"), text(" 713")) == (1.0, "713")
assert reward(call("23 * 31"), text("712")) == (0.3, "713")
assert reward(call("23 * 32"), text("736")) == (0.1, "736")
assert reward(call("__import__('os')"), text("1")) == (0.1, "error: write a product")
assert len(agent.problems()) > 1000
"""


def test_calculator_example_rewards_a_right_number_only_after_a_tool_call():
    subprocess.run([sys.executable, "-c", _AGENT], cwd=EXAMPLES / "calculator", check=True, timeout=PATIENCE_S)


def test_converted_language_model_has_the_given_chat_template(tmp_path, monkeypatch):
    """A small model and tokenizer take the place of those that transformers would read from the GGUF file."""
    spec = importlib.util.spec_from_file_location("fetch_model", EXAMPLES / "smollm2" / "fetch_model.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = script.LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=True, **sizes))
    monkeypatch.setattr(script.AutoTokenizer, "from_pretrained", lambda *_, **__: char_tokenizer())
    monkeypatch.setattr(script.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: model)
    template = EXAMPLES / "calculator" / "tools.jinja"
    script.convert(Path("model.gguf"), tmp_path, script.DTYPES["bfloat16"], template=template)
    assert ChatTokenizer.load(tmp_path).check_calls().form.name == "Hermes"
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.slow
def test_example_language_model_is_fetched_checked_and_trained_for_one_step(tmp_path):
    pytest.importorskip("gguf", reason="pip install -e '.[smollm2]'")
    model = tmp_path / "model"
    script = EXAMPLES / "smollm2" / "fetch_model.py"
    subprocess.run([sys.executable, str(script), str(model)], check=True, timeout=600)
    recipe = EXAMPLES / "smollm2" / "json_facts.toml"
    arguments = [str(recipe), f"model.path={model}", f"run.directory={tmp_path}", "evaluation.problems=0"]
    subprocess.run([*CLI, "check", *arguments], check=True, timeout=600)
    short = ("run.steps=1", "training.rollouts_per_step=8", "sampling.group_size=4")
    with launched([*arguments, *short], tmp_path / "json_facts") as run:
        assert run.end() == 0, run.story()
