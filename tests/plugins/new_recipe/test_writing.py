"""`pipelinerl new`: the recipe passes `check`, its reward works on the data, and bad input is rejected."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pipelinerl.cli import app
from pipelinerl.config.recipe import MODELS, load
from pipelinerl.errors import UserError
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.plugins.new_recipe.writing import write_new

MODEL = MODELS / "tiny_speller"
ANSWER, TRUTH = {"role": "assistant", "content": "4"}, {"reward_model": {"style": "rule", "ground_truth": "4"}}


def rows(path: Path, count: int = 120, **names: str) -> Path:
    prompt, answer = names.get("prompt", "prompt"), names.get("answer", "answer")
    words = [f"{chr(97 + n % 26)}{chr(97 + n // 26)}t" for n in range(count)]
    path.write_text("".join(json.dumps({prompt: word, answer: word[::-1]}) + "\n" for word in words))
    return path


def new(directory: Path, data: Path, **fields: Any) -> Path:
    return write_new(directory, model=MODEL, data=data, **{"prompt_field": None, "answer_field": None} | fields)


def test_new_recipe_passes_check_unchanged(tmp_path: Path) -> None:
    recipe = new(tmp_path / "mine", rows(tmp_path / "words.jsonl", prompt="question", answer="solution"))
    result = CliRunner().invoke(app, ["check", str(recipe), f"run.directory={tmp_path}"])
    assert result.exit_code == 0, result.output
    assert "of the reference answer correct, reward 1" in result.output
    config = load(recipe)
    assert config.run.name == "mine" and config.domains[0].parameters["answer_field"] == "solution"
    assert config.domains[0].name == "words", "of the data's file"
    assert config.groups_in_flight == config.engine.slots, "an evaluation with one sample a problem fills all slots"
    assert config.engine.context_length > config.sampling.max_tokens >= 32


def test_new_recipe_turns_reasoning_off_where_the_chat_template_has_a_switch(tmp_path: Path) -> None:
    model = tmp_path / "thinker"
    shutil.copytree(MODEL, model)
    template = ChatTokenizer.load(model)._tokenizer.chat_template
    switch = "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    (model / "chat_template.jinja").write_text(template + switch)
    data = rows(tmp_path / "words.jsonl")
    plain = load(new(tmp_path / "plain", data))
    thinker = load(write_new(tmp_path / "mine", model=model, data=data, prompt_field=None, answer_field=None))
    assert dict(thinker.domains[0].chat_template_kwargs) == {"enable_thinking": False}
    assert not plain.domains[0].chat_template_kwargs
    assert thinker.engine.context_length > plain.engine.context_length, "the prompt ends with an empty thought"


def test_reward_of_a_new_recipe_compares_values_and_not_spelling(tmp_path: Path) -> None:
    recipe = new(tmp_path / "mine", rows(tmp_path / "words.jsonl"))
    names: dict[str, Any] = {}
    exec(recipe.with_name("rewards.py").read_text(), names)
    score = names["score"]
    assert score('thinking…\n{"b": 1, "a": 2}', '{"a": 2, "b": 1}') == 1
    assert score("1,200.", "1200") == score("Yes", "yes.") == 1
    assert score("", "1") == score("no", "yes") == score("[" * 100_000, "1") == 0


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (lambda prompt: {"messages": [*prompt, ANSWER]}, 'messages_field = "messages", answer_field = "messages"'),
        (
            lambda prompt: {"prompt": prompt, **TRUTH},
            'prompt_field = "prompt", answer_field = "reward_model.ground_truth"',
        ),
    ],
)
def test_new_recipe_finds_the_answers_of_common_layouts(tmp_path, row, line):
    data = tmp_path / "rows.jsonl"
    prompts = ([{"role": "user", "content": f"{n} plus 1?"}] for n in range(60))
    data.write_text("".join(f"{json.dumps(row(prompt))}\n" for prompt in prompts))
    assert line in new(tmp_path / "mine", data).read_text()


@pytest.mark.parametrize(
    ("content", "fields", "sentence"),
    [
        ('{"text": "x"}\n', {}, "no field of .* looks like the prompt; set --prompt-field to one of text"),
        ('{"prompt": "x", "answer": "y"}\n', {"answer_field": "z"}, "has no field 'z'; it has prompt, answer"),
        ('{"prompt": "x", "answer": "y"}\n', {}, "held_out split of its files is empty"),
        ("", {}, "has no rows"),
    ],
)
def test_new_recipe_for_unusable_data_is_rejected(
    tmp_path: Path, content: str, fields: dict[str, str], sentence: str
) -> None:
    data = tmp_path / "bad.jsonl"
    data.write_text(content)
    with pytest.raises(UserError, match=sentence):
        new(tmp_path / "mine", data, **fields)
    assert not (tmp_path / "mine").exists()


def test_new_recipe_in_an_existing_directory_or_without_data_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "recipe.toml").write_text("")
    with pytest.raises(UserError, match="exists and is not empty; give a new directory"):
        new(tmp_path / "mine", rows(tmp_path / "words.jsonl"))
    with pytest.raises(UserError, match="--data must be a file"):
        new(tmp_path / "other", tmp_path)
    with pytest.raises(UserError, match=r"--data must end in .*, got words\.txt"):
        new(tmp_path / "other", rows(tmp_path / "words.txt"))
