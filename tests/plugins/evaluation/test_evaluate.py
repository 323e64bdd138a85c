"""`pipelinerl eval` against a model directory, a run, one of our engines and another server."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file

from pipelinerl.config.recipe import MODELS, load, parse, save, to_table, write_layout
from pipelinerl.engines.http.server import create_app
from pipelinerl.engines.options import EngineOptions
from pipelinerl.errors import RecipeError, UserError
from pipelinerl.plugins.bigram import engine as bigram_engine
from pipelinerl.plugins.bigram.model import BigramModel
from pipelinerl.plugins.evaluation.evaluate import evaluate, show, with_one_evaluation
from pipelinerl.plugins.evaluation.evaluation_loop import MOST_FAILURES
from pipelinerl.plugins.evaluation.respondents import _with_model, recipe_of, target_of
from pipelinerl.plugins.warmstart.tiny_decoder import char_tokenizer
from pipelinerl.roles.dtypes import settled
from tests.fakes.openai_server import OpenAIFake
from tests.fakes.served import in_thread
from tests.patience import PATIENCE_S
from trainer_contract.types import WeightDType

QUIET = Console(quiet=True)


@pytest.fixture
def model(tmp_path):
    """Return a random bigram model, which sometimes answers "1" or "2", the correct answers of the two domains."""
    directory, tokenizer = tmp_path / "model", char_tokenizer(alphabet=" 0123456789")
    BigramModel.random(len(tokenizer), seed=0, scale=1.0).save(directory)
    tokenizer.save_pretrained(str(directory), save_jinja_files=False)
    return directory


@pytest.fixture
def recipe(tmp_path, model):
    """Return a recipe with two domains, whose reward function only compares the answer with the ground truth."""
    (tmp_path / "right.py").write_text("def right(answer, completion):\n    return completion == answer\n")
    blocks = []
    for domain, answer in (("says_1", "1"), ("says_2", "2")):
        lines = [json.dumps({"prompt": f"{domain[-1]} {number}", "answer": answer}) for number in range(40)]
        (tmp_path / f"{domain}.jsonl").write_text("\n".join(lines))
        path = json.dumps(str(tmp_path / f"{domain}.jsonl"))
        blocks.append(
            f'[[domains]]\nname = "{domain}"\nsource = "files"\nverifier = "right.py:right"\n'
            f"parameters = {{ path = {path}, held_out_path = {path} }}\n"
        )
    path = tmp_path / "recipe_file.toml"
    path.write_text(
        f'[model]\npath = "{model}"\n[engine]\ntype = "bigram"\n[trainer]\ntype = "bigram"\n'
        "[sampling]\nmax_tokens = 2\n[evaluation]\nproblems = 20\nsamples = 8\ntemperature = 1.0\npass_at = [1, 4]\n"
        + "".join(blocks)
    )
    return path


def evaluated(target, config, **options):
    return evaluate(target_of(target), config, token=None, model="", console=QUIET, **options)


def test_model_directory_is_evaluated_by_its_own_engine(model, recipe):
    report = evaluated(str(model), load(recipe))
    assert (report.figures.problems, report.incomplete, report.unjudged) == (20, 0, 0)
    assert report.figures.accuracy is not None and 0 < report.figures.accuracy < 1
    assert [each.k for each in report.figures.pass_at] == [1, 4, 8]
    assert list(report.by_domain) == ["says_1", "says_2"]
    assert report.figures.length_mean is not None and 0 < report.figures.length_mean <= 2


def test_bfloat16_model_is_evaluated_in_float32_on_a_cpu_as_in_a_run(tmp_path):
    half = tmp_path / "half"
    shutil.copytree(MODELS / "tiny_speller", half)
    weights = load_file(half / "model.safetensors")
    save_file({name: value.bfloat16() for name, value in weights.items()}, half / "model.safetensors")
    settings = json.loads((half / "config.json").read_text())
    (half / "config.json").write_text(json.dumps(settings | {"dtype": "bfloat16"}))
    config = load("tiny", ["engine.device=cpu"])
    assert _with_model(config, half).engine.dtype is settled(config.changed("model", path=str(half))).engine.dtype
    assert _with_model(config, half).engine.dtype is WeightDType.FLOAT32


def test_engine_at_a_url_gives_the_same_answers_as_a_local_engine(model, recipe):
    """The sampling noise depends only on the seed, so both engines sample the same tokens."""
    options = EngineOptions(model_path=model, model_id="m", slots=64, max_waiting=4096, context_length=512)
    with in_thread(create_app(bigram_engine.from_options(options), token=None)) as url:
        there = evaluated(f"{url}/v1/", load(recipe))
    here = evaluated(str(model), load(recipe))
    assert (there.figures, there.by_domain) == (here.figures, here.by_domain)


def test_third_party_openai_server_is_evaluated_from_its_answer_texts(recipe):
    fake = OpenAIFake(lambda body: "1" if body["messages"][0]["content"].startswith("1") or body["seed"] % 2 else "2")
    with in_thread(fake.app) as url:
        report = evaluated(url, load(recipe, ["evaluation.samples=4", "evaluation.pass_at=[1]"]))
    assert report.by_domain["says_1"].accuracy == 1.0
    others = report.by_domain["says_2"].accuracy
    assert others is not None and 0 < others < 1, "each sample has a seed of its own"
    assert len(fake.bodies) == 20 * 4 and {body["model"] for body in fake.bodies} == {"small"}
    assert report.figures.length_mean == 1.0


def test_error_of_an_evaluation_in_which_every_problem_fails_contains_the_servers_reason(recipe):
    fake = OpenAIFake(lambda body: "1", failures=(400,) * 1000)
    changes = ["evaluation.samples=1", "evaluation.pass_at=[]", "actor.groups_in_flight=1"]
    with in_thread(fake.app) as url, pytest.raises(UserError, match=r"failed and none was answered; .*not now"):
        evaluated(url, load(recipe, changes))
    assert len(fake.bodies) == MOST_FAILURES


def test_run_is_evaluated_with_its_own_recipe_at_the_chosen_checkpoint(tmp_path, model, recipe):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    save(load(recipe), run / "recipe.toml")
    write_layout(run)
    with pytest.raises(UserError, match=r"has no checkpoint yet$"):
        target_of(str(run))
    for step in (5, 40, 100):
        (run / "checkpoints" / f"step-{step:06d}").symlink_to(model)
    target = target_of(str(run))
    assert (target.version, recipe_of(target, None)) == (100, str(run / "recipe.toml"))
    for name in ("step-000040", "40", "step-40"):
        assert target_of(str(run), checkpoint=name).version == 40
    with pytest.raises(UserError, match="no checkpoint 400; it has step-000005, step-000040, step-000100"):
        target_of(str(run), checkpoint="400")
    report = evaluate(target, load(recipe_of(target, None)), token=None, model="", console=QUIET)
    assert report.figures.problems == 20


def test_evaluation_of_an_unusable_target_is_rejected_before_any_request(tmp_path, model, recipe):
    with pytest.raises(UserError, match="nothing is neither a run's directory, nor a model's, nor a URL"):
        target_of(str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="--checkpoint needs a run's directory"):
        target_of(str(model), checkpoint="step-000001")
    with pytest.raises(UserError, match="--recipe is required"):
        recipe_of(target_of(str(model)), None)
    base = shutil.copytree(model, tmp_path / "base")
    (base / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match=f"{base} has no chat template, as a base model may"):
        target_of(str(base))
    with pytest.raises(UserError, match="is an external server, which cannot load"):
        served = ["engine.type=vllm_server", 'engine.servers=["http://127.0.0.1:9"]']
        evaluated(str(model), load(recipe, served))
    with pytest.raises(RecipeError, match=r"evaluation.problems is 0"):
        evaluated(str(model), load(recipe, ["evaluation.problems=0"]))


def test_repeated_evaluation_reuses_the_answers_in_its_output_file(tmp_path, recipe):
    out, once = tmp_path / "answers.jsonl", ["evaluation.samples=1", "evaluation.pass_at=[]"]
    fake = OpenAIFake(lambda body: "1" if len(body["messages"][0]["content"]) % 2 else "2", failures=(400, 400))
    with in_thread(fake.app) as url:
        first = evaluated(url, load(recipe, [*once, "evaluation.problems=12"]), out=out)
        assert (first.asked, first.figures.problems, first.incomplete) == (12, 10, 2)
        with out.open("ab") as file:
            # an incomplete line, as a killed evaluation leaves it
            file.write(b'{"kind":"EvaluationDone","order_id":"eval-0-0')
        request_count = len(fake.bodies)
        rest = evaluated(url, load(recipe, once), out=out)
        assert (rest.asked, rest.incomplete) == (10, 0), "two failed problems and eight new ones"
        assert len(fake.bodies) - request_count == 10
        request_count = len(fake.bodies)
        again = evaluated(url, load(recipe, once), out=out)
        fewer = evaluated(url, load(recipe, [*once, "evaluation.problems=5"]), out=out)
        assert (again.asked, fewer.asked, fewer.figures.problems, len(fake.bodies)) == (0, 0, 5, request_count)
        whole = evaluated(url, load(recipe, once))
    assert again.figures == rest.figures == whole.figures and again.by_domain == whole.by_domain


def test_evaluation_rejects_an_output_file_that_was_written_with_other_settings_or_weights(tmp_path, model, recipe):
    out = tmp_path / "answers.jsonl"
    evaluated(str(model), load(recipe), out=out)
    before = out.read_bytes()
    for change in ("evaluation.temperature=0.5", "evaluation.split=validation", "run.seed=3", 'sampling.stop=["7"]'):
        named = change.partition("=")[0].partition(".")[2]
        with pytest.raises(UserError, match=rf"another question \(another {named}\); name another --out"):
            evaluated(str(model), load(recipe, [change]), out=out)
    BigramModel.random(len(char_tokenizer(alphabet=" 0123456789")), seed=1, scale=1.0).save(model)
    with pytest.raises(UserError, match=r"another question \(another weights\)"):
        evaluated(str(model), load(recipe), out=out)
    assert out.read_bytes() == before


def test_evaluation_set_is_selected_by_name_and_its_settings_can_be_overridden_on_the_command_line(model, recipe):
    table = to_table(load(recipe))
    sets = [{"name": "both"}, {"name": "ones", "domains": ["says_1"], "problems": 6, "samples": 2, "pass_at": [2]}]
    config = parse(table | {"evaluations": sets})
    assert [each.name for each in with_one_evaluation(config, "", {}).evaluation_sets] == ["both"]
    report = evaluated(str(model), with_one_evaluation(config, "ones", {"problems": 4, "samples": None}))
    assert (report.name, report.problems, report.samples, list(report.by_domain)) == ("ones", 4, 2, ["says_1"])
    with pytest.raises(RecipeError, match="--evaluation 'twos' is not one of the recipe's evaluation sets: both, ones"):
        with_one_evaluation(config, "twos", {})
    with pytest.raises(RecipeError, match=r"evaluations\.ones\.pass_at names 2"):
        with_one_evaluation(config, "ones", {"samples": 1})
    alone = with_one_evaluation(load(recipe), "", {"problems": 3, "split": "validation"})
    (chosen,) = alone.evaluation_sets
    assert (chosen.name, chosen.split, chosen.problems, chosen.samples) == ("validation", "validation", 3, 8)


def test_evaluation_report_can_be_printed_as_a_table_or_as_json(model, recipe, capsys):
    report = evaluated(str(model), load(recipe))
    show(report, Console(), as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed["figures"]["accuracy"] == report.figures.accuracy and "says_1" in printed["by_domain"]
    console = Console(record=True, width=200, file=io.StringIO())
    show(report, console, as_json=False)
    text = console.export_text()
    assert "pass@8" in text and "says_2" in text and "8 × 20 samples" in text


def test_evaluation_ends_immediately_on_ctrl_c_without_a_traceback(model, recipe):
    """The engine that the evaluation has started must end as well."""
    command = [sys.executable, "-m", "pipelinerl.cli", "eval", str(model), "--recipe", str(recipe), "--problems", "40"]
    command += ["--samples", "512", "--set", "sampling.max_tokens=200"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ, text=True)
    deadline = time.monotonic() + PATIENCE_S
    while not _listens_to_signals(process.pid):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "Traceback" not in errors


def _listens_to_signals(pid):
    """Return True if the process handles SIGTERM, which Python does not do by default."""
    caught = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)
