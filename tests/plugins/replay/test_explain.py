"""`pipelinerl explain` with presets, recipes, and rollouts from JSON and from records."""

import asyncio
import json

import pytest
from typer.testing import CliRunner

from pipelinerl.cli import app
from pipelinerl.config.recipe import MODELS
from pipelinerl.errors import UserError
from pipelinerl.messages import ROLLOUTS
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.objective.catalogue import PRESETS
from pipelinerl.observability.events import EventLog
from pipelinerl.streams.embedded_redis import EmbeddedRedis
from pipelinerl.streams.records import encode_group
from pipelinerl.streams.redis_stream import open_stream
from tests.fakes.rollouts import group

ROLLOUT = {"reward": 1, "tokens": ["so", "[4]"], "behavior_logprobs": [-1, -0.7], "logprobs": [-1, -0.3]}
OTHER = {"reward": 0, "tokens": ["5"], "behavior_logprobs": [-1.7]}


def explain(*arguments):
    result = CliRunner().invoke(app, ["explain", *arguments], env={"COLUMNS": "200"}, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


@pytest.fixture
def stored(tmp_path):
    def store(content):
        path = tmp_path / "rollouts.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return store


@pytest.mark.parametrize("name", PRESETS)
def test_explain_describes_every_preset(name):
    output = explain(name)
    assert output.startswith(f"{name}: ") and "sg[agg · is_weight]" in output
    for slot in ("agg", "is_weight", "adv", "grad1", "grad2"):
        assert f"\n{slot}" in output
    assert f"groups whose rewards are all equal: {PRESETS[name].no_signal}" in output
    if columns := PRESETS[name].objective.passes | PRESETS[name].objective.needs:
        assert all(f"{column} (" in output for column in columns)
    else:
        assert "needs nothing but" in output


def test_explain_without_arguments_lists_the_presets():
    lines = explain().splitlines()
    assert [line.split()[0] for line in lines] == ["preset", *PRESETS]
    assert next(line for line in lines if line.startswith("ppo ")).rstrip().endswith("values")


def test_explain_describes_the_objective_of_a_recipe_with_command_line_overrides():
    output = explain("tiny", "training.no_signal=filter", "objective.grad1.epsilon_high=0.31")
    assert output.startswith("pipelinerl with changes: ")
    assert "r_t > 1.31" in output and "all equal: filter" in output


def test_explain_shows_the_gradient_factors_of_each_token_in_rollouts_read_from_json(stored):
    lines = explain("grpo", "--rollout", stored({"rollouts": [ROLLOUT, OTHER]})).splitlines()[-4:]
    assert lines[0].split() == ["group", "rollout", "t", "token", "agg", "is_weight", "adv", "M", "multiplier"]
    assert lines[1].split() == ["0", "0", "0", "'so'", "0.25", "1", "1", "1", "+0.25"]
    assert lines[2].split() == ["0", "0", "1", "'[4]'", "0.25", "1", "1", "0", "+0"]
    assert lines[3].split() == ["0", "1", "0", "'5'", "0.5", "1", "-1", "1", "-0.5"]


def test_explain_reads_rollouts_from_a_file_with_an_encoded_rollout_group(tmp_path):
    path = tmp_path / "group"
    path.write_bytes(encode_group(group(0)))
    output = explain("ppo_tis", "--rollout", str(path))
    assert len(output.split("multiplier")[1].strip().splitlines()) == sum(
        r.num_sampled_tokens for r in group(0).rollouts
    )


def test_explain_compares_two_algorithms_on_its_built_in_example():
    output = explain("--compare", "grpo", "prime_rl")
    assert output.startswith("grpo: DeepSeekMath") and "\nprime_rl: prime-rl" in output
    assert "\nagg " in output and "\ngrad1 " in output and "equal: is_weight\n" in output
    rows = [line.split() for line in output.split("gradient\n")[1].splitlines() if line.split()[0] in ("0", "1")]
    assert len(rows) == 11
    # π of this token rises from 0.01 to 0.03. grpo clips the ratio 3 only if A > 0; prime-rl never clips it.
    well = next(row for row in rows if row[4] == "'well'")
    assert well[5] == "3" and well[12:15] == ["1", "|", "1"] and float(well[6]) < 0
    late = next(row for row in rows if row[5] == "6")
    assert late[12:15] == ["0", "|", "0"] and late[15] == "+0.0000" and float(late[17]) < 0, "the penalty remains"
    assert "of 11 tokens grpo trains 7, prime_rl trains 11; cosine of the two gradients: 0.872" in output


def test_explain_compares_recipes_and_finds_an_algorithm_equal_to_itself(stored):
    file = stored({"rollouts": [ROLLOUT, OTHER]})
    assert "of 3 tokens grpo trains 2, grpo trains 2; cosine of the two gradients: 1.000" in explain(
        "--compare", "grpo", "grpo", "--rollout", file
    )
    assert explain("--compare", "tiny", "gdpo", "--rollout", file).startswith("tiny: PipelineRL's post")
    refused = CliRunner().invoke(app, ["explain", "grpo", "--compare", "grpo", "dapo"])
    assert refused.exit_code == 2 and "leave out the argument" in refused.output


def test_explain_reads_the_components_of_each_reward_from_json(stored):
    parts = [["right", 1, 1], ["short", 0.5, -1]]
    file = stored({"rollouts": [ROLLOUT | {"parts": parts}, OTHER | {"parts": [["right", 0, 1], ["short", 0.5, -1]]}]})
    lines = explain("gdpo", "--rollout", file).splitlines()[-3:]
    assert [line.split()[6] for line in lines] == ["1", "1", "-1"]
    with pytest.raises(UserError, match=r"rollouts\.0\.parts must be a list of \[name, reward, weight\]"):
        explain("gdpo", "--rollout", stored({"rollouts": [ROLLOUT | {"parts": [1]}]}))


@pytest.fixture(scope="module")
def ended_run(tmp_path_factory):
    """Return a run whose only step trained the groups with indices 4 and 7; its stream also has untrained groups."""
    run_dir = tmp_path_factory.mktemp("runs") / "ended"
    abandoned = group(7, (1.0, 1.0, 0.0), version=5, epoch=1)

    async def roll_out(url):
        stream = await open_stream(url, namespace="ended")
        groups = [group(4, epoch=2), abandoned, group(7, (0.0, 0.0, 1.0), epoch=2), group(8, epoch=2)]
        await stream.append(ROLLOUTS + "a", [encode_group(each) for each in groups], first_id=1)
        await stream.close()

    with EmbeddedRedis(run_dir / "redis") as server:
        asyncio.run(roll_out(server.url))
    with EventLog(run_dir / "events.jsonl") as events:
        for epoch in (1, 2):
            events.write("trainer_ready", epoch=epoch, model_version=0, elapsed_s=0.0)
        events.write("step", step=1, model_version=1, orders=[4, 7], elapsed_s=1.0)
    (run_dir / "recipe.toml").write_text('base = "tiny"\n[run]\nname = "ended"\n')
    return run_dir


def test_explain_shows_the_rollouts_of_a_step_of_a_run(ended_run):
    run = ["--run", str(ended_run), "--step", "1"]
    rows = [line.split() for line in explain("grpo", *run).split("multiplier")[1].strip().splitlines()]
    assert [(row[0], row[1]) for row in rows[::2]] == [("4", "0"), ("4", "1"), ("7", "2"), ("7", "3"), ("7", "4")]
    tokenizer = ChatTokenizer.load(MODELS / "tiny_speller")
    assert [row[3] for row in rows[:2]] == [repr(tokenizer.decode([token])) for token in (3, 4)]
    assert float(rows[-1][-1]) > 0 > float(rows[4][-1]), "of order 7 the copy that was trained on"
    alone = explain("grpo", *run, "--group", "7").split("multiplier")[1].strip().splitlines()
    assert [line.split() for line in alone] == rows[4:], "the factors are still computed on the whole batch"
    assert explain(*run).startswith("pipelinerl"), "the default is the run's own objective"


def test_explain_rejects_a_step_or_group_that_was_not_recorded(ended_run):
    with pytest.raises(UserError, match=r"step 9 is not in .*/events.jsonl; its steps are 1 to 1"):
        explain("grpo", "--run", str(ended_run), "--step", "9")
    with pytest.raises(UserError, match="did not train on the group of order 8; its orders are 4, 7"):
        explain("grpo", "--run", str(ended_run), "--step", "1", "--group", "8")
    unfinished = CliRunner().invoke(app, ["explain", "grpo", "--run", str(ended_run)])
    assert unfinished.exit_code == 2 and "belong together" in unfinished.output


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "is neither a record of a group nor JSON"),
        ([], "must hold"),
        ({"rollouts": []}, "at least one rollout"),
        ({"rollouts": [3]}, r"rollouts\.0 must be an object, got 3"),
        ({"rollouts": [ROLLOUT | {"rewards": 1}]}, r"rollouts\.0\.rewards is unknown; expected any of tokens, reward"),
        ({"rollouts": [ROLLOUT, OTHER | {"reward": "1"}]}, r"rollouts\.1\.reward must be a number, got '1'"),
        ({"rollouts": [ROLLOUT | {"tokens": "so"}]}, r"rollouts\.0\.tokens must be a list of text, got 'so'"),
        ({"rollouts": [ROLLOUT | {"judged": 1}]}, r"rollouts\.0\.judged must be true or false, got 1"),
        ({"rollouts": [ROLLOUT | {"group": "a"}]}, r"rollouts\.0\.group must be a whole number, got 'a'"),
        ({"rollouts": [{"reward": 1, "tokens": ["a"]}]}, r"rollouts\.0\.behavior_logprobs must be given"),
        ({"rollouts": [ROLLOUT | {"logprobs": [True, 0]}]}, r"rollouts\.0\.logprobs must be a list of numbers"),
        ({"rollouts": [ROLLOUT | {"logprobs": [-1]}]}, "rollout 0 has 2 tokens but 1 logprobs"),
    ],
)
def test_explain_rejects_a_malformed_rollout_file_in_one_sentence(content, sentence, stored):
    with pytest.raises(UserError, match=sentence):
        explain("grpo", "--rollout", stored(content))


def test_explain_rejects_an_unknown_preset_or_missing_file(stored, tmp_path):
    with pytest.raises(UserError, match=r"'dpo' is neither a preset nor a recipe; presets are reinforce, .*tiny"):
        explain("dpo")
    with pytest.raises(UserError, match=r"grpo is a preset, and run\.seed=1 changes a recipe"):
        explain("grpo", "run.seed=1")
    with pytest.raises(UserError, match="cannot be read: No such file"):
        explain("grpo", "--rollout", str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="rollout 0 has no ref_logprobs, which this objective reads"):
        explain("grpo_kl", "--rollout", stored({"rollouts": [ROLLOUT]}))
