"""Tests of `[[domains]]` tables: prompts, sampling, verifiers, and files relative to the recipe."""

import json
import re
from pathlib import Path

import pytest

from pipelinerl.config.domains import DomainSection
from pipelinerl.config.layers import overridden
from pipelinerl.config.recipe import load, parse, save, to_table
from pipelinerl.errors import RecipeError
from pipelinerl.plugins.judge import JudgeSection
from pipelinerl.types import Message

URL = "http://127.0.0.1:9000"
SHOTS = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]


def with_domain(**domain):
    return parse(to_table(load("tiny")) | {"domains": [{"name": "d", "source": "addition", **domain}]})


def test_domain_overrides_the_prompt_and_sampling_settings_of_the_run():
    prompts = {"system_prompt": "s", "prompt_template": "Say {prompt}", "few_shot": SHOTS}
    sampling = {"chat_template_kwargs": {"enable_thinking": False}, "stop": ["\n"], "max_tokens": 7, "temperature": 0.5}
    (domain,) = with_domain(**prompts, **sampling).domains
    assert domain.prompts.system == "s" and domain.prompts.few_shot[1] == Message("assistant", "2")
    assert domain.prompts.template.render({"prompt": "x"}) == "Say x"
    own = domain.sampling
    assert (own.temperature, own.max_tokens, own.stop) == (0.5, 7, ("\n",))
    assert own.chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("domain", "sentence"),
    [
        ({"prompt_template": "{{ x"}, r"domains\.d\.prompt_template: prompt_template is not a valid Jinja template"),
        ({"few_shot": SHOTS[:1]}, r"domains\.d: few_shot must end with the assistant's answer, got 'user' last"),
        ({"few_shot": [{"role": "bot", "content": ""}]}, r"domains\.d\.few_shot\.0\.role: .* got 'bot'"),
        (
            {"system_prompt": "s", "few_shot": [{"role": "system", "content": "t"}, *SHOTS]},
            "few_shot must not hold a system message together with system_prompt",
        ),
        ({"temperature": 0.0}, r"domains\.d\.temperature"),
        ({"max_tokens": 32}, r"domains\.d\.max_tokens \(32\) must be below engine\.context_length \(32\)"),
        ({"stop": [""]}, r"domains\.d\.stop\.0"),
        ({"chat_template_kwargs": {"a": [1]}}, r"domains\.d\.chat_template_kwargs\.a"),
    ],
)
def test_invalid_domain_is_rejected(domain, sentence):
    with pytest.raises(RecipeError, match=sentence):
        with_domain(**domain)


def written(folder):
    """Write a recipe together with its data, few-shot examples and base."""
    (folder / "data").mkdir(parents=True)
    rows = "".join(json.dumps({"prompt": f"q{i}", "answer": "a"}) + "\n" for i in range(20))
    (folder / "data" / "a.jsonl").write_text(rows)
    (folder / "data" / "shots.json").write_text(json.dumps(SHOTS))
    (folder / "base.toml").write_text(
        'base = "tiny"\n[[domains]]\nname = "d"\nsource = "files"\nfew_shot = "data/shots.json"\n'
        '[domains.parameters]\npath = ["data/*.jsonl"]\nheld_out_path = "~/x.jsonl"\nprompt_field = "prompt"\n'
    )
    (folder / "deeper").mkdir()
    (folder / "deeper" / "mine.toml").write_text('base = "../base.toml"\n[run]\nname = "mine"\n')
    return folder / "deeper" / "mine.toml"


def test_domain_files_are_relative_to_the_recipe_that_names_them(tmp_path, monkeypatch):
    recipe = written(tmp_path / "where")
    monkeypatch.chdir(tmp_path)
    config = load(recipe.relative_to(tmp_path))
    (domain,) = config.domains
    assert domain.parameters["path"] == [str(tmp_path / "where" / "data" / "*.jsonl")]
    assert domain.parameters["held_out_path"] == str(Path.home() / "x.jsonl")
    assert domain.parameters["prompt_field"] == "prompt"
    assert [shot.content for shot in domain.few_shot] == ["1+1=", "2"]
    save(config, tmp_path / "saved.toml")
    assert load(tmp_path / "saved.toml") == config, "wherever it is saved"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [(None, "domains.d.few_shot: .*shots.json cannot be read"), ("{", "is not JSON"), ("{}", "must hold a list")],
)
def test_error_names_an_unreadable_few_shot_file(text, sentence, tmp_path):
    recipe = written(tmp_path)
    shots = tmp_path / "data" / "shots.json"
    shots.unlink() if text is None else shots.write_text(text)
    with pytest.raises(RecipeError, match=sentence):
        load(recipe)


def sized(sizes, *overrides):
    """Return the shipped recipe with one domain for each group size in `sizes`."""
    domains = [{"name": name, "source": "addition", "group_size": size} for name, size in sizes.items()]
    return parse(overridden(to_table(load("tiny")) | {"domains": domains}, overrides))


def test_domain_group_size_overrides_that_of_the_run():
    config = sized({"own": 4, "other": None}, "sampling.group_size=12", "training.rollouts_per_step=64")
    own, other = config.domains
    assert (config.group_size_of(own), config.group_size_of(other)) == (4, 12)
    assert (own.sampling.group_size, other.sampling.group_size) == (4, None)
    assert config.groups_per_step == 8, "64 / ((4 + 12) / 2)"


@pytest.mark.parametrize(
    ("sizes", "overrides", "sentence"),
    [
        ({"a": 6, "b": 6}, [], "training.rollouts_per_step (256) must be a multiple of domains.a.group_size (6)"),
        ({"a": 4, "b": 512}, [], "training.rollouts_per_step (256) must be at least domains.b.group_size (512)"),
        ({"a": 4, "b": None}, ["engine.max_waiting=7"], "engine.max_waiting (7) must be at least sampling.group_size"),
        ({"a": 2}, ["streams.max_groups=100"], "streams.max_groups (100) must be at least the 128 groups of a step"),
        ({"a": 0}, [], "domains.a.group_size: Input should be greater than or equal to 1, got 0"),
    ],
)
def test_group_sizes_that_cannot_fill_a_step_are_rejected(sizes, overrides, sentence):
    with pytest.raises(RecipeError, match=re.escape(sentence)):
        sized(sizes, *overrides)


def test_judge_key_is_absent_from_repr_and_saved_recipe(monkeypatch):
    monkeypatch.setenv("A_KEY", "secret-7")
    section = JudgeSection(url=URL, key_variable="A_KEY")
    domain = DomainSection(name="d", source="addition", verifier="judge", judge=section)
    config = load("tiny").model_copy(update={"domains": (domain,)})
    assert section.token == "secret-7"
    assert "secret-7" not in repr((section, to_table(config)))
    assert to_table(config)["domains"][0]["judge"]["key_variable"] == "A_KEY"


@pytest.mark.parametrize(
    ("change", "uses"), [("services=2", True), ("judged_in=services", True), ("services=0", False)]
)
def test_answers_are_judged_by_verifier_services_if_the_recipe_starts_or_chooses_such_services(change, uses):
    assert load("tiny", [f"verification.{change}"]).verification.uses_services is uses
