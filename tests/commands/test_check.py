"""`pipelinerl check` rejects what would stop a run later, and accepts the shipped recipes."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from pipelinerl.cli import app
from pipelinerl.commands.check import findings, refuse
from pipelinerl.component import missing_packages
from pipelinerl.config.learning import CurationSection
from pipelinerl.config.recipe import MODELS, RECIPES, load, parse, to_table
from pipelinerl.errors import ModelError, RecipeError
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.plugins.bigram.model import BigramModel
from pipelinerl.registry import ENGINES
from pipelinerl.roles.engine_rules import check_engine_options, check_truncation
from pipelinerl.roles.problems import training_problems
from pipelinerl.types import Message
from tests.patience import PATIENCE_S

SHIPPED = MODELS / "tiny_speller"
QUICK = ("evaluation.problems=4",)


def with_domain(**domain):
    """Return the shipped recipe with one domain and room for long prompts."""
    table = to_table(load("tiny", [*QUICK, "engine.context_length=64"]))
    return parse(table | {"domains": [{"name": "d", **domain}]})


def said(config, part):
    """Return the findings of one part of a recipe."""
    return [text for each, text in findings(config) if each == part]


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_check_accepts_every_shipped_recipe(recipe):
    config = load(recipe)
    if missing_packages(ENGINES[config.engine.type]):
        with pytest.raises(RecipeError, match=r"needs .*, which is not installed"):
            refuse(config)
        return
    verifiers = [domain.verifier for domain in config.domains]
    if "oubliette" in verifiers and shutil.which("bwrap") is None:
        pytest.skip(f"left out: the recipe {recipe.stem}, whose programs need bubblewrap")
    results = dict(findings(config))
    assert list(results) == [
        *("model", "engine", "trainer"),
        *(["attention"] if config.trainer.type == "torch" else []),
        *("objective", "step", "staleness"),
        "verifier",
        *(["instructions"] if "instruction_following" in verifiers else []),
        *("prompt", "training", "held out"),
    ]
    assert results["training"] != results["held out"]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["sampling.top_p=0.9", "engine.type=vllm"], "engine.type 'vllm'"),
        (["sampling.top_k=20", "engine.type=vllm_server", "engine.servers=['http://h:1']"], "type 'vllm_server'"),
        (["sampling.top_p=0.9", "elastic.types.vllm.max=1"], "elastic.types 'vllm'"),
    ],
)
def test_truncated_training_samples_need_engines_that_report_the_policys_logprobs(overrides, key):
    with pytest.raises(RecipeError, match=rf"from before this truncation, .*{key} cannot; use .*sglang_server.* torch"):
        check_truncation(load("tiny", overrides))
    check_truncation(load("tiny", overrides[1:]))
    check_truncation(load("tiny", ["sampling.top_p=0.9", "sampling.top_k=20", "elastic.types.torch.max=2"]))


def test_check_shows_the_file_of_a_user_reward_and_its_verdicts_on_trial_answers(tmp_path):
    (tmp_path / "r.py").write_text("def short(completion):\n    return -len(completion) / 10\n")
    rewards = [{"function": f"{tmp_path}/r.py:short", "weight": 0.5}, {"function": "math_answer", "weight": 1.0}]
    results = list(findings(with_domain(source="addition", parameters={"max_digits": 1}, rewards=rewards)))
    assert ("user code", f"domains.d.rewards.0.function = short, {tmp_path}/r.py:1") in results
    finding = dict(results)["verifier"]
    assert re.fullmatch(
        r"domains.d: of the reference answer partial, reward 0.\d+ \(short -0.[12], math_answer 1\) in .* s; "
        r"of an empty answer wrong, reward 0 \(short 0, math_answer 0\) in .* s: math_answer: no answer",
        finding,
    )


def of_two_sizes(size, *overrides):
    """Return the shipped recipe with groups of 8, and a second domain with groups of `size`."""
    config = load("tiny", [*QUICK, *overrides])
    first = config.domains[0]
    second = first.model_copy(update={"name": "second", "group_size": size})
    return config.model_copy(update={"domains": (first, second)})


HISTORY = ("objective=decoupled_ppo", "training.old_logprobs=sampling_weights", "staleness.j=4", "staleness.k=10")


@pytest.mark.parametrize(
    ("config", "part", "text"),
    [
        (
            load("tiny", [*QUICK, "trainer.options.mesh={dp_shard=2,cp=2}"]),
            "mesh",
            "4 processes, a copy of the model over 4; 2 micro-batches at once, each computed by 2 processes",
        ),
        (load("tiny", [*QUICK, *HISTORY]), "old log-probs", r"3 versions of the weights, \d MiB .*\(\d MiB at most"),
        (of_two_sizes(8), "step", "256 rollouts, 32 groups of 8$"),
        (of_two_sizes(20), "step", "256 to 272 rollouts, about 18 whole groups: of 8 from short_words, of 20 from sec"),
        (of_two_sizes(8), "staleness", 'keep such groups with staleness.overdue = "wait"'),
    ],
)
def test_check_shows_what_a_setting_means(config, part, text):
    assert re.search(text, dict(findings(config))[part])


FILTERS = """
def keep(lengths, correct):
    return max(lengths) < 9 or 'long'
def drop(correct):
    return sum(correct) > 4 or 'hard'
def fails(metadata):
    return metadata['size'] > 3
def weather(weather):
    return True
"""


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("mine.py:keep", "curation.filter, of a made-up group of d, 4 of 8 right: keeps it, in "),
        ("mine.py:drop", "4 of 8 right: filters it: hard, in "),
        ("mine.py:fails", r"curation.filter cannot judge a group: .*mine.py:7: KeyError: 'size'"),
        ("mine.py:weather", "curation.filter: a filter may take only the parameters .*; got weather"),
        ("keep", "curation.filter must be path.py:function or package.module:function, got 'keep'"),
    ],
)
def test_check_tries_a_user_filter_on_a_synthetic_group(name, sentence, tmp_path):
    (tmp_path / "mine.py").write_text(FILTERS)
    curation = CurationSection(filter=f"{tmp_path}/{name}" if ".py" in name else name)
    config = with_domain(source="addition", parameters={"max_digits": 1}).model_copy(update={"curation": curation})
    try:
        results = dict(findings(config))
    except RecipeError as error:
        assert re.search(sentence, str(error))
    else:
        assert sentence in results["filter"]
        assert results["user code"].startswith(f"curation.filter = {name.rpartition(':')[2]}, {tmp_path}/mine.py:")


@pytest.mark.parametrize("key", ["engine.type", "trainer.type"])
def test_check_accepts_any_options_of_an_engine_or_trainer_written_by_the_user(key, tmp_path):
    (tmp_path / "mine.py").write_text("def make(*_): ...\n")
    section = key.partition(".")[0]
    refuse(load("tiny", [f"{key}={tmp_path}/mine.py:make", f"{section}.options.zzz=1"]))
    with pytest.raises(RecipeError, match=rf"{key}: {tmp_path}/mine.py has no 'other'; it has make"):
        refuse(load("tiny", [f"{key}={tmp_path}/mine.py:other"]))


def test_check_of_a_gpu_recipe_fails_here_and_passes_for_another_machine():
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    overrides = ["trainer.device=cuda", "weights.backend=nccl"]
    (warning,) = said(load("tiny", [*QUICK, *overrides]), "warning")
    assert warning.startswith("trainer.device, weights.backend need a GPU, and this machine has none; a run here would")
    here = CliRunner().invoke(app, ["check", "tiny", *QUICK, *overrides])
    assert here.exit_code == 1 and "the recipe needs more GPUs than this machine has" in here.output
    there = CliRunner().invoke(app, ["check", "tiny", *QUICK, *overrides, "--device-gib", "80"])
    assert there.exit_code == 0 and "the recipe can run" in there.output


def test_check_before_a_run_imports_neither_torch_nor_transformers():
    """`pipelinerl run` calls `refuse` in the launcher's process, which must use little memory while the run lasts."""
    script = (
        "import sys; from pipelinerl.config.recipe import load; from pipelinerl.commands.check import refuse; "
        "from pipelinerl.commands.findings.problems import FIRST, refuse_problems; "
        "refuse(load('tiny')); refuse_problems(load('tiny'), FIRST); "
        "print(sorted({'torch', 'transformers', 'reasoning_gym'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (answer.stdout, answer.returncode) == ("[]\n", 0), answer.stderr


def without(name):
    return lambda path: (path / name).unlink()


def rewritten(name, content):
    def rewrite(path):
        (path / name).write_bytes(content)

    return rewrite


def wider(path):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"intermediate_size": 10}))


def not_a_number(path):
    weights = load_file(path / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (without("tokenizer.json"), "lacks tokenizer.json"),
        (without("model.safetensors"), r"lacks \*.safetensors"),
        (lambda path: os.truncate(path / "model.safetensors", 100_000), "is no safetensors file: a tensor ends at"),
        (rewritten("model.safetensors", b"x" * 1000), "is no safetensors file: .*; copy it again"),
        (rewritten("config.json", b"[]"), "config.json"),
        (rewritten("config.json", b'{"model_type": "zzz"}'), "'zzz'|`zzz`"),
        (rewritten("tokenizer.json", b"{}"), "the tokenizer of .* cannot be used"),
        (not_a_number, "the parameter model.norm.weight holds NaN or infinite values"),
        (wider, "weights do not fit config.json: 6 absent or of another shape, first model.layers.0.mlp"),
    ],
)
def test_check_rejects_an_incomplete_or_damaged_model_directory(tmp_path, damage, sentence, capfd):
    path = tmp_path / "model"
    shutil.copytree(SHIPPED, path)
    damage(path)
    with pytest.raises(ModelError, match=sentence) as refused:
        list(findings(load("tiny", [*QUICK, f"model.path={path}"])))
    assert "\n" not in str(refused.value)
    assert capfd.readouterr().err == "", "only the error is printed"


def test_check_rejects_a_model_without_a_chat_template(tmp_path):
    """The commands `run` and `check` print the same message."""
    path = shutil.copytree(SHIPPED, tmp_path / "model")
    named = json.loads((path / "tokenizer_config.json").read_text())
    template = named.pop("chat_template")
    (path / "tokenizer_config.json").write_text(json.dumps(named))
    config = load("tiny", [*QUICK, f"model.path={path}"])
    with pytest.raises(ModelError, match=f"^{path} has no chat template, as a base model may; write one into") as run:
        refuse(config)
    with pytest.raises(ModelError) as engine:
        ChatTokenizer.load(path).encode_chat([Message("user", "a")])
    assert str(run.value) == str(engine.value)
    (path / "chat_template.jinja").write_text(template)
    refuse(config)


def test_check_warns_of_a_tokenizer_with_more_tokens_than_the_model(tmp_path):
    """The usual cause is a padding token added to the tokenizer alone; only prompts with that token fail."""
    path = shutil.copytree(SHIPPED, tmp_path / "model")
    tokens = json.loads((path / "tokenizer.json").read_text())
    last = max(tokens["added_tokens"], key=lambda token: token["id"])
    tokens["added_tokens"].append(last | {"id": 4000, "content": "<|more|>"})
    (path / "tokenizer.json").write_text(json.dumps(tokens))
    (warning,) = said(load("tiny", [*QUICK, f"model.path={path}"]), "warning")
    assert f"the tokenizer of {path} has " in warning and "refused by engines" in warning


def test_check_rejects_an_engine_or_trainer_that_does_not_fit_the_model_type(tmp_path):
    path = tmp_path / "model"
    shutil.copytree(SHIPPED, path)
    (path / "model.safetensors").unlink()
    BigramModel.random(57, seed=0).save(path)
    bigrams = [*QUICK, f"model.path={path}", "engine.type=bigram", "trainer.type=bigram"]
    assert "model" in dict(findings(load("tiny", bigrams)))
    for part in ("engine", "trainer"):
        with pytest.raises(ModelError, match=f"{part}.type 'torch' does not fit the model in .*, of type 'bigram'"):
            list(findings(load("tiny", [*bigrams, f"{part}.type=torch"])))
        with pytest.raises(ModelError, match=f"{part}.type 'bigram' does not fit the model in .*, of type 'qwen3'"):
            list(findings(load("tiny", [*QUICK, f"{part}.type=bigram"])))


def test_check_rejects_a_context_in_which_rotary_angles_depend_on_the_texts_length(tmp_path):
    path = tmp_path / "model"
    shutil.copytree(SHIPPED, path)
    config = json.loads((path / "config.json").read_text())
    factors = [2.0] * (config["head_dim"] // 2)
    scaled = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": factors, "long_factor": factors}
    config["rope_parameters"] = {**scaled, "original_max_position_embeddings": 16}
    (path / "config.json").write_text(json.dumps(config))
    for changed in ([f"model.path={path}"], [f"reference.path={path}", "objective.grad2=kl"]):
        with pytest.raises(RecipeError, match=r"engine\.context_length must be at most 16, got \d+: .* \(longrope\)"):
            list(findings(load("tiny", [*QUICK, *changed])))


TURNS = {"preset": "grpo", "adv": {"credit": "turns"}}


def spelling(objective, **domain):
    config = with_domain(source="reasoning_gym:spell_backward", verifier="reasoning_gym", **domain)
    return config.model_copy(update={"objective": objective})


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (with_domain(source="addition", verifier="reasoning_gym"), "d:[0-9a-f]+: not a reasoning-gym problem"),
        (
            with_domain(source="reasoning_gym:countdown", verifier="reasoning_gym"),
            "scorer of countdown runs answers as",
        ),
        (of_two_sizes(4, "objective=gfpo"), r"objective\.adv\.keep \(8\) must be below sampling\.group_size \(8\)"),
        (of_two_sizes(1, "objective=grpo"), r"adv\.baseline mean needs groups, and domains\.second\.group_size is 1"),
        (spelling("decoupled_ppo", reward={"mean": "group"}, group_size=1), r"domains\.d\.reward\.mean group needs"),
        (spelling(TURNS, reward={"scale": 2.0}), r"domains\.d\.reward: mean, std, low, high and scale change"),
    ],
)
def test_check_rejects_settings_that_do_not_fit_each_other(config, sentence):
    with pytest.raises(RecipeError, match=sentence):
        list(findings(config))


def test_check_rejects_engine_options_of_the_recipe_and_a_user_reward_that_raises_an_error(tmp_path):
    with pytest.raises(RecipeError, match=r"engine\.options\.max_model_len is set by engine\.context_length"):
        check_engine_options(load("tiny", ["engine.type=vllm", "engine.options.max_model_len=16"]))
    (tmp_path / "r.py").write_text("def score(problem, text):\n    return problem.metadata['level']\n")
    with pytest.raises(RecipeError, match=r"domains.d.verifier cannot judge its problems: .*r.py:2: KeyError: 'level'"):
        list(findings(with_domain(source="addition", verifier=f"{tmp_path}/r.py:score")))


def test_check_shows_the_prompt_of_each_domain_as_the_model_sees_it():
    config = with_domain(
        source="reasoning_gym:spell_backward",
        verifier="reasoning_gym",
        parameters={"min_word_len": 3, "max_word_len": 4, "answer_pattern": "[a-z]+"},
        system_prompt="be brief",
        few_shot=[{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}],
    )
    (shown,) = said(config, "prompt")
    messages = training_problems(config).problem(0).messages
    assert [message.role for message in messages] == ["system", "user", "assistant", "user"]
    tokenizer = ChatTokenizer.load(SHIPPED)
    ids = tokenizer.encode_chat(messages)
    assert shown == f"of domain d, {len(ids)} tokens:\n{tokenizer.decode(ids)}"
    assert "<|system|>be brief<|end|><|user|>ab<|end|><|assistant|>ba<|end|><|user|>" in shown


def file_of(path, *, long, of=400):
    """Write a data file with `of` problems, `long` of which have long prompts; return its domain."""
    texts = [f"{i}" * (18 if i < 100 + long else 1) for i in range(100, 100 + of)]
    path.write_text("".join(json.dumps({"prompt": text, "answer": "1"}) + "\n" for text in texts))
    return {"source": "files", "parameters": {"path": str(path), "prompt_field": "prompt"}}


def test_check_warns_of_a_few_prompts_that_exceed_the_context_and_rejects_many_such_prompts(tmp_path):
    few = with_domain(**file_of(tmp_path / "few.jsonl", long=16))
    sentence = r"training: \d\.\d% of 256 prompts of domain d do not fit, the longest with \d+ tok"
    assert re.match(sentence, said(few, "warning")[0])
    many = with_domain(**file_of(tmp_path / "many.jsonl", long=100))
    with pytest.raises(RecipeError, match=r"\d\d% of 256 prompts of domain d do not fit; raise it, or lower max_to"):
        list(findings(many))
    roomy = with_domain(**file_of(tmp_path / "few.jsonl", long=16), max_tokens=1)
    assert not [text for text in said(roomy, "warning") if text.startswith("training")]


def test_check_rejects_more_evaluation_problems_than_the_data_holds(tmp_path):
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"say {i}", "answer": str(i)}) + "\n" for i in (*range(100), 7)))
    table = to_table(with_domain(source="files", parameters={"path": str(file)}))
    results = list(findings(parse(table | {"evaluation": {"problems": 2}})))
    assert dict(results)["held out"]
    rows = [text for part, text in results if part == "rows"]
    assert rows[0].startswith("training, domains.d: 101 rows read: ") and "1 dropped as duplicates" in rows[0]
    assert rows[1].startswith("held out, domains.d: 101 rows read: ")
    with pytest.raises(RecipeError, match=r"holds \d+ problems; lower evaluation.problems, or add rows to held_out_"):
        list(findings(parse(table | {"evaluation": {"problems": 100}})))
    assert dict(findings(parse(table | {"evaluation": {"problems": 0}})))["held out"] == "no problems"


def objective_lines(*overrides):
    """Return the findings of `check` about the objective, and its warnings."""
    results = list(findings(load("tiny", [*QUICK, *overrides])))
    return [[text for part, text in results if part == wanted] for wanted in ("objective", "warning")]


def test_check_shows_the_resolved_objective_and_its_differences_from_the_preset():
    (first, *slots), warnings = objective_lines()
    assert first == "pipelinerl, changed in is_weight, adv, grad1; needs nothing beyond the rollouts"
    assert [line.split(" = ")[0] for line in slots] == ["agg", "is_weight", "adv", "grad1", "grad2"]
    assert slots[1].startswith("is_weight = one  (pipelinerl has token_ratio(")
    assert slots[4] == "grad2 = none" and warnings == []
    (first, *_), warnings = objective_lines("objective=dr_grpo", "objective.agg.length=256")
    assert first == "dr_grpo, changed in agg; needs nothing beyond the rollouts"
    assert [w.partition(",")[0] for w in warnings] == ["objective.agg.length is 256"]
