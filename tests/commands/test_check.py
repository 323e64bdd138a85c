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


def test_check_warns_that_slow_domains_of_a_mixture_lose_groups_to_staleness():
    two = [{"name": name, "source": "addition"} for name in ("quick", "slow")]
    mixed = to_table(load("tiny", [*QUICK, "engine.context_length=64"])) | {"domains": two}
    assert 'keep such groups with staleness.overdue = "wait"' in dict(findings(parse(mixed)))["staleness"]
    waits = mixed | {"staleness": {"j": 1, "k": 2, "overdue": "wait"}}
    assert "overdue" not in dict(findings(parse(waits)))["staleness"]


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
        *(
            "verifier",
            *(["instructions"] if "instruction_following" in verifiers else []),
            "prompt",
            "training",
            "held out",
        ),
    ]
    assert results["training"] != results["held out"]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["sampling.top_p=0.9", "engine.type=vllm"], "engine.type 'vllm'"),
        (
            ["sampling.top_k=20", "engine.type=vllm_server", "engine.servers=['http://h:1']"],
            "engine.type 'vllm_server'",
        ),
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


def test_check_describes_a_mesh():
    finding = dict(findings(load("tiny", [*QUICK, "trainer.options.mesh={dp_shard=2,cp=2}"])))["mesh"]
    assert finding == "4 processes, a copy of the model over 4; 2 micro-batches at once, each computed by 2 processes"


def test_check_rejects_a_user_reward_that_raises_an_error(tmp_path):
    (tmp_path / "r.py").write_text("def score(problem, text):\n    return problem.metadata['level']\n")
    with pytest.raises(RecipeError, match=r"domains.d.verifier cannot judge its problems: .*r.py:2: KeyError: 'level'"):
        list(findings(with_domain(source="addition", verifier=f"{tmp_path}/r.py:score")))


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("return max(lengths) < 9 or 'long'", "curation.filter, of a made-up group of d, 4 of 8 right: keeps it, in "),
        ("return sum(correct) > 4 or 'hard'", "4 of 8 right: filters it: hard, in "),
    ],
)
def test_check_tries_a_user_filter_on_a_synthetic_group(body, sentence, tmp_path):
    (tmp_path / "mine.py").write_text(f"def keep(lengths, correct):\n    {body}\n")
    config = with_domain(source="addition", parameters={"max_digits": 1})
    config = config.model_copy(update={"curation": CurationSection(filter=f"{tmp_path}/mine.py:keep")})
    results = list(findings(config))
    assert sentence in dict(results)["filter"]
    assert ("user code", f"curation.filter = keep, {tmp_path}/mine.py:1") in results


@pytest.mark.parametrize(
    ("filter", "sentence"),
    [
        ("mine.py:keep", r"curation.filter cannot judge a group: .*mine.py:2: KeyError: 'size'"),
        ("mine.py:weather", "curation.filter: a filter may take only the parameters .*; got weather"),
        ("keep", "curation.filter must be path.py:function or package.module:function, got 'keep'"),
    ],
)
def test_check_rejects_a_failing_or_invalid_user_filter(filter, sentence, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def keep(metadata):\n    return metadata['size'] > 3\n\ndef weather(weather):\n    return True\n"
    )
    named = f"{tmp_path}/{filter}" if ".py" in filter else filter
    config = with_domain(source="addition", parameters={"max_digits": 1})
    with pytest.raises(RecipeError, match=sentence):
        list(findings(config.model_copy(update={"curation": CurationSection(filter=named)})))


@pytest.mark.parametrize("key", ["engine.type", "trainer.type"])
def test_check_accepts_any_options_of_an_engine_or_trainer_written_by_the_user(key, tmp_path):
    (tmp_path / "mine.py").write_text("def make(*_): ...\n")
    section = key.partition(".")[0]
    refuse(load("tiny", [f"{key}={tmp_path}/mine.py:make", f"{section}.options.zzz=1"]))
    with pytest.raises(RecipeError, match=rf"{key}: {tmp_path}/mine.py has no 'other'; it has make"):
        refuse(load("tiny", [f"{key}={tmp_path}/mine.py:other"]))


def test_check_rejects_invalid_engine_options_by_name():
    own = load("tiny", ["engine.type=vllm", "engine.options.max_model_len=16"])
    with pytest.raises(
        RecipeError, match=r"engine\.options\.max_model_len is set by engine\.context_length; leave it out"
    ):
        check_engine_options(own)
    check_engine_options(load("tiny", ["engine.type=vllm", "engine.options.block_size=16"]))


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


def test_check_shows_the_size_of_the_weight_history():
    overrides = [*QUICK, "objective=decoupled_ppo", "training.old_logprobs=sampling_weights", "staleness.j=4"]
    finding = dict(findings(load("tiny", [*overrides, "staleness.k=10"])))["old log-probs"]
    each = sum(file.stat().st_size for file in SHIPPED.glob("*.safetensors")) / 2**20
    assert finding.startswith(
        f"3 versions of the weights, {3 * each:,.0f} MiB of the trainer's host memory and of each"
    )
    assert f"({10 * each:,.0f} MiB at most" in finding


@pytest.mark.parametrize(
    "overrides",
    [
        ["objective=ppo", "critic.warmup_steps=3", "critic.clip=inf"],
        ["objective.preset=grpo", "objective.grad2=kl", "kl_control.target=0.1", "reference.path=shipped:tiny_speller"],
        ["objective=ppo_recomputed", "training.old_logprobs=behavior"],
        ["objective=ppo_tis", "training.old_logprobs=sampling_weights"],
        ["objective=ppo", "critic.schedule=cosine", "critic.rate_warmup_steps=2", "critic.final_fraction=0.1"],
    ],
)
def test_check_accepts_valid_trainer_settings(overrides):
    refuse(load("tiny", overrides))


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
        (without("config.json"), "lacks config.json"),
        (lambda path: os.truncate(path / "model.safetensors", 4), "is no safetensors file: .*; copy it again"),
        (
            lambda path: os.truncate(path / "model.safetensors", 100_000),
            "is no safetensors file: a tensor ends at byte",
        ),
        (rewritten("model.safetensors", b"x" * 1000), "is no safetensors file: .*; copy it again"),
        (rewritten("config.json", b"{"), "config.json"),
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


@pytest.mark.parametrize(
    ("domain", "sentence"),
    [
        ({"source": "zzz"}, "domains.d.source must be one of reasoning_gym, addition, files, .*, hub, got 'zzz'"),
        ({"source": "reasoning_gym:zzz"}, "domains.d: reasoning-gym refuses task 'zzz'"),
        (
            {"source": "reasoning_gym:spell_backward", "parameters": {"zz": 1}},
            "domains.d: reasoning-gym refuses task 'spell_backward'",
        ),
        ({"source": "files"}, "domains.d.parameters.path must be the path of a file or folder, got None"),
        ({"source": "addition", "verifier": "zzz"}, "domains.d.verifier must be one of .*, got 'zzz'"),
        (
            {"source": "addition", "verifier": "reasoning_gym"},
            "domains.d: d:[0-9a-f]+: not a reasoning-gym problem: its metadata lacks 'task'",
        ),
        (
            {"source": "reasoning_gym:countdown", "verifier": "reasoning_gym"},
            "domains.d: d:[0-9a-f]+: reasoning-gym's scorer of countdown runs answers as code",
        ),
    ],
)
def test_check_rejects_unknown_or_incompatible_problem_sources_and_verifiers(domain, sentence):
    with pytest.raises(RecipeError, match=sentence):
        list(findings(with_domain(**domain)))


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


def test_path_of_a_users_source_file_is_relative_to_the_recipe(tmp_path, monkeypatch):
    (tmp_path / "where").mkdir()
    (tmp_path / "where" / "mine.py").write_text(
        "def sums(most):\n"
        "    return [{'prompt': f'{a}+{b}=', 'answer': str(a + b)} for a in range(most) for b in range(most)]\n"
    )
    (tmp_path / "where" / "mine.toml").write_text(
        'base = "tiny"\n[engine]\ncontext_length = 64\n[evaluation]\nproblems = 4\n'
        '[[domains]]\nname = "sums"\nsource = "mine.py:sums"\nparameters = { most = 30 }\n'
        'prompt_template = "{prompt}?"\n'
    )
    monkeypatch.chdir(tmp_path)
    config = load("where/mine.toml")
    (prompt,) = said(config, "prompt")
    assert re.search(r"<\|user\|>\d+\+\d+=\?<\|end\|>", prompt)
    problem = training_problems(parse(to_table(config))).problem(0)
    left, right = problem.messages[0].content.removesuffix("=?").split("+")
    assert int(problem.ground_truth) == int(left) + int(right)
    (tmp_path / "where" / "mine.toml").write_text(
        (tmp_path / "where" / "mine.toml").read_text().replace('sums"', 'zzz"')
    )
    with pytest.raises(RecipeError, match=r"domains\.zzz\.source: .*mine\.py has no 'zzz'"):
        refuse(load("where/mine.toml"))


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
    with pytest.raises(
        RecipeError, match=r"\d\d% of 256 prompts of domain d do not fit; raise it, or lower max_tokens"
    ):
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
    with pytest.raises(
        RecipeError, match=r"holds \d+ problems; lower evaluation.problems, or add rows to held_out_path"
    ):
        list(findings(parse(table | {"evaluation": {"problems": 100}})))
    assert dict(findings(parse(table | {"evaluation": {"problems": 0}})))["held out"] == "no problems"


def of_two_sizes(size):
    """Return the shipped recipe with groups of 8, and a second domain with groups of `size`."""
    config = load("tiny", QUICK)
    first = config.domains[0]
    second = first.model_copy(update={"name": "second", "group_size": size})
    return config.model_copy(update={"domains": (first, second)})


@pytest.mark.parametrize(
    ("size", "objective", "sentence"),
    [
        (4, "gfpo", r"objective\.adv\.keep \(8\) must be below sampling\.group_size \(8\)"),
        (1, "grpo", r"objective\.adv\.baseline mean needs groups, and domains\.second\.group_size is 1"),
    ],
)
def test_check_rejects_objective_settings_without_effect_in_some_domain(size, objective, sentence):
    with pytest.raises(RecipeError, match=sentence):
        refuse(of_two_sizes(size).model_copy(update={"objective": objective}))


def test_check_shows_rollouts_per_step_and_group_sizes():
    assert said(of_two_sizes(8), "step") == ["256 rollouts, 32 groups of 8"]
    several = "256 to 272 rollouts, about 18 whole groups: of 8 from short_words, of 20 from second"
    assert said(of_two_sizes(20), "step") == [several]


def test_check_rejects_subtracting_the_group_mean_from_rewards_in_groups_of_one():
    config = with_domain(
        source="reasoning_gym:spell_backward", verifier="reasoning_gym", reward={"mean": "group"}, parameters={}
    )
    lone = config.model_copy(update={"sampling": config.sampling.model_copy(update={"group_size": 1})})
    objective = {"preset": "decoupled_ppo"}
    with pytest.raises(RecipeError, match=r"domains\.d\.reward\.mean group needs groups"):
        refuse(lone.model_copy(update={"objective": objective}))
    refuse(config.model_copy(update={"objective": objective}))


@pytest.mark.parametrize(("reward", "refused"), [({"scale": 2.0}, True), ({"overlong_tokens": 8}, False)])
def test_check_rejects_reward_rescaling_if_credit_is_assigned_per_turn(reward, refused):
    config = with_domain(
        source="reasoning_gym:spell_backward", verifier="reasoning_gym", reward=reward, parameters={}
    ).model_copy(update={"objective": {"preset": "grpo", "adv": {"credit": "turns"}}})
    if not refused:
        refuse(config)
        return
    with pytest.raises(RecipeError, match=r"domains\.d\.reward: mean, std, low, high and scale change"):
        refuse(config)


def objective_lines(*overrides):
    """Return the findings of `check` about the objective, and its warnings."""
    results = list(findings(load("tiny", [*QUICK, *overrides])))
    return [text for part, text in results if part == "objective"], [
        text for part, text in results if part == "warning"
    ]


def test_check_shows_the_resolved_objective_and_its_differences_from_the_preset():
    (first, *slots), warnings = objective_lines()
    assert first == "pipelinerl, changed in is_weight, adv, grad1; needs nothing beyond the rollouts"
    assert [line.split(" = ")[0] for line in slots] == ["agg", "is_weight", "adv", "grad1", "grad2"]
    assert slots[1].startswith("is_weight = one  (pipelinerl has token_ratio(")
    assert slots[4] == "grad2 = none" and warnings == []
    (first, *slots), (warning,) = objective_lines("objective.preset=ppo_tis")
    assert first == "ppo_tis; needs old_logprobs" and "high = 2.0" in slots[1]
    assert warning.startswith("objective.grad1 clips π_θ/π_old, which is always 1 here")
    (first, *_), warnings = objective_lines("objective=dr_grpo", "objective.agg.length=256")
    assert first == "dr_grpo, changed in agg; needs nothing beyond the rollouts"
    assert [w.partition(",")[0] for w in warnings] == ["objective.agg.length is 256"]
    (first, *slots), warnings = objective_lines("objective=agarwal")
    assert first == "agarwal; needs vocab_mean_logprobs" and "length = 8.0" in slots[0] and warnings == []
