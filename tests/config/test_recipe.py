"""Tests of recipes: bases, overrides, error messages, and that a saved recipe reads back equal."""

from __future__ import annotations

import math
import stat
from pathlib import Path

import pytest

from inference_contract.weights import OnUpdate
from pipelinerl.config import recipe as config
from pipelinerl.config.recipe import RunConfig, load, parse, save, to_table
from pipelinerl.enums import StalenessScope
from pipelinerl.errors import RecipeError
from pipelinerl.objective.reward import NormalizationScope, RewardShaping
from pipelinerl.staleness import StalenessBounds
from trainer_contract.types import Precision

MINIMAL = {"model": {"path": "m"}, "domains": [{"name": "d", "source": "addition"}]}


def refusal(*overrides: str) -> str:
    """Return the error message for the shipped recipe with the given overrides."""
    with pytest.raises(RecipeError) as refused:
        load("tiny", overrides)
    return str(refused.value)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("run.stepz=3", "run.stepz: unknown key; did you mean steps?"),
        (
            "training.learning_rate=1",
            "training.learning_rate: unknown key; did you mean optimizer.learning_rate or critic.learn",
        ),
        ("zzz.a=1", "zzz: unknown key; known keys are model, domains, run, "),
        ("domains.long_words.sauce=x", "domains.long_words.sauce: unknown key; did you mean source?"),
        (
            "domains.zzz.weight=1",
            "domains.zzz.weight: none of domains is called zzz; there are short_words, long_words",
        ),
        ("domains.long_words=3", "domains.long_words: domains is a list of tables: name one, and a key of it"),
        ('domains={name="d"}', "domains: is a list of tables: begin each with [[domains]] instead of [domains]"),
        (
            "engine.dtype=f8",
            "engine.dtype: Input should be 'auto', or Input should be 'float32', 'bf",
        ),
        ("run.steps=9999999999999999999", "run.steps: a whole number must be between -2^63 and 2^63, got 9999999999"),
        ("model.path=a\udcff", "model.path: contains bytes that are not UTF-8, got 'a\\udcff'; rename that"),
        ("run.steps=true", "run.steps: Input should be a valid integer, got True"),
        ('run.steps="12"', "run.steps: Input should be a valid integer, got '12'"),
        ("run.steps=3.0", "run.steps: Input should be a valid integer, got 3.0"),
        ("run.steps=0", "run.steps: Input should be greater than or equal to 1, got 0"),
        ("run=3", "run: must be a table of keys, got 3"),
        ("run.steps.x=3", "run.steps.x: steps is not a table"),
        ("run.name=7", 'run.name: must be a text in quotes: "…", got 7'),
        ("run.name=a/b", "run.name: String should match pattern"),
        ("run.name=..", "run.name: String should match pattern"),
        ("optimizer.learning_rate=inf", "optimizer.learning_rate: Input should be a finite number"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas.1: Input should be less than 1"),
        ("training.deadline_s=nan", "training.deadline_s: Input should be a finite number"),
        (
            "trainer.precision=fp8",
            "trainer.precision: Input should be 'auto', or Input should be 'fp32' or 'bf16', got 'fp8'",
        ),
        ("engine.device=npu", "engine.device: Input should be 'auto', 'cpu', 'cuda' or 'tpu', got 'npu'"),
        ("engine.weights=fp8", "engine.weights: Input should be 'native', 'int8' or 'int4', got 'fp8'"),
        ("staleness.preset=fast", "staleness.preset must be one of on_policy, one_step_off, pipeline, rlax"),
        ("staleness.k=1.5", "staleness.k must be a whole number or inf, got 1.5"),
        ("objective=3", "objective: must be the name of a preset or a table, got 3"),
        ("training.rollouts_per_step=12", "training.rollouts_per_step (12) must be a multiple of sampling.group_size"),
        ("training.epochs=0", "training.epochs: Input should be greater than or equal to 1, got 0"),
        ("training.mini_batches=33", "training.mini_batches (33) must be at most the 32 groups of a step (training.ro"),
        ("training.target_kl=0", "training.target_kl: Input should be greater than 0, got 0"),
        (
            "training.target_kl=0.1",
            "training.target_kl skips further optimizer steps of a step, but there",
        ),
        ("streams.max_groups=4", "streams.max_groups (4) must be at least the 32 groups of a step"),
        ("sampling.max_tokens=32", "sampling.max_tokens (32) must be below engine.context_length (32)"),
        (
            "sampling.temperature=1e-6",
            "sampling.temperature: Input should be greater than or equal to 0.00001, got 1e-06",
        ),
        ("sampling.top_p=1e-7", "sampling.top_p: Input should be greater than or equal to 0.000001, got 1e-07"),
        ("sampling.top_k=2147483648", "sampling.top_k: Input should be less than 2147483648, got 2147483648"),
        ('sampling.stop=["a", ""]', "sampling.stop.1: String should have at least 1 character, got ''"),
        ("engine.max_waiting=7", "engine.max_waiting (7) must be at least sampling.group_size (8): an engine would"),
        ("evaluation.temperature=1e-6", "evaluation.temperature must be 0 or at least 1e-05, got 1e-06"),
        ("evaluation.samples=4", "evaluation.samples (4) of one problem are all the same at evaluation.temperature ="),
        ("evaluation.pass_at=[1,4]", "evaluation.pass_at names 4, but pass@k can be estimated only from"),
        ("evaluation.pin=train", "evaluation.pin: Input should be 'auto', 'none', 'engine' or 'gate', got 'train'"),
        ("evaluation.max_tokens=99", "evaluation.max_tokens (99) must be below engine.context_length (32)"),
        ("domains=[]", "domains: must be one or more domains with unique names, got none"),
        ("run.steps", "an override must read section.key=value, got 'run.steps'"),
        ("=3", "an override must read section.key=value, got '=3'"),
        ("weights.backend=mpi", "weights.backend: Input should be 'gloo' or 'nccl', got 'mpi'"),
        ("weights.timeout_s=0", "weights.timeout_s: "),
        ("weights.transport=pigeon", "weights.transport: Input should be 'broadcast' or 'pull', got 'pigeon'"),
        ("parameter_server.versions=1", "parameter_server.versions: Input should be greater than or equal to 2, got 1"),
        ('parameter_server.urls=["a:1"]', "parameter_server.urls.0: "),
        ('parameter_server.urls=["http://a:1", "http://a:1"]', "parameter_server.urls must name each server once"),
    ],
)
def test_invalid_override_is_rejected_in_one_line_naming_the_key(override: str, sentence: str) -> None:
    assert refusal(override).startswith(sentence)
    assert "\n" not in refusal(override), "one finding, one line"


def test_recipe_whose_trainer_staleness_bound_k_is_below_its_engine_reload_bound_j_is_rejected() -> None:
    assert refusal("staleness.j=2", "staleness.k=1").startswith("staleness.k must be at least j = 2, got 1: ")


def test_each_recipe_error_is_on_its_own_line() -> None:
    assert refusal("run.steps=0", "engine.slots=x").splitlines() == [
        "run.steps: Input should be greater than or equal to 1, got 0",
        "engine.slots: Input should be a valid integer, got 'x'",
    ]


def test_launcher_starts_parameter_servers_if_weights_are_pulled_and_the_recipe_names_no_server_urls() -> None:
    assert config.load("tiny").servers_to_start == 0
    pulled = ["weights.transport=pull", "parameter_server.replicas=3"]
    assert config.load("tiny", pulled).servers_to_start == 3
    assert config.load("tiny", [*pulled, "parameter_server.shards=2"]).servers_to_start == 6
    assert refusal("parameter_server.shards=2", 'parameter_server.urls=["http://a:1"]') == (
        "parameter_server.urls must name equally many servers for each of the 2 shards, got 1 in all"
    )
    assert config.load("tiny", [*pulled, 'parameter_server.urls=["http://a:1"]']).servers_to_start == 0


def test_incompatible_broadcast_settings_are_rejected() -> None:
    assert refusal("weights.backend=nccl", "trainer.device=cpu") == (
        'weights.backend = "nccl" needs GPUs, but trainer.device is cpu and engine.device auto'
    )
    assert refusal("weights.host=trainer-0", "weights.transport=pull") == (
        'weights.backend and weights.host apply to a broadcast, but weights.transport is "pull"'
    )


def test_error_omits_the_password_of_a_redis_address() -> None:
    with pytest.raises(RecipeError, match="must begin with redis://") as refused:
        config.parse({"streams": {"redis_url": "http://:s3cret@host"}})
    assert "s3cret" not in str(refused.value)


def test_domain_names_must_be_unique() -> None:
    domain = {"name": "d", "source": "addition"}
    with pytest.raises(RecipeError, match="domains: must be one or more domains with unique names, got d, d"):
        parse({**MINIMAL, "domains": [domain, domain]})


def test_recipe_without_required_sections_is_rejected() -> None:
    with pytest.raises(RecipeError, match="model: must be given\ndomains: must be given"):
        parse({})


def test_derived_recipe_overrides_single_keys_of_its_base(tmp_path: Path) -> None:
    (tmp_path / "first.toml").write_text('base = "tiny"\n[run]\nsteps = 5\n[staleness]\nk = 7\n')
    (tmp_path / "second.toml").write_text('base = "first.toml"\n[staleness]\nk = inf\n')
    resolved, tiny = load(tmp_path / "second.toml", ["run.seed=3", "model.path=some where"]), load("tiny")
    assert (resolved.run.steps, resolved.run.seed, resolved.model.path) == (5, 3, "some where")
    assert resolved.staleness.bounds == StalenessBounds(tiny.staleness.bounds.j, math.inf)
    assert resolved.domains == tiny.domains


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"a.toml": 'base = "b.toml"', "b.toml": 'base = "a.toml"'}, "a.toml: base refers back to this file"),
        ({"a.toml": 'base = "a.toml"'}, "a.toml: base refers back to this file"),
        ({"a.toml": 'base = "nope"'}, "recipe 'nope' is neither a file nor a shipped recipe; shipped are:"),
        ({"a.toml": "base = 3"}, "a.toml: base must be the text of a path, or the name of a shipped recipe, got 3"),
        ({"a.toml": "a = = 3"}, "a.toml: not valid TOML"),
        ({"a.toml": "\udcff"}, "a.toml: not valid TOML"),
        ({}, "is neither a file nor a shipped recipe"),
    ],
)
def test_files_that_are_not_recipes_are_rejected(tmp_path: Path, files: dict[str, str], sentence: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text, errors="surrogateescape")
    with pytest.raises(RecipeError, match=sentence):
        load(tmp_path / "a.toml")


def test_override_strings_and_lists_become_typed_values() -> None:
    resolved = load("tiny", ["trainer.precision=bf16", "engine.on_update=abort", 'sampling.stop=["a", "b"]'])
    assert resolved.trainer.precision is Precision.BF16
    assert resolved.engine.on_update is OnUpdate.ABORT
    assert resolved.sampling.stop == ("a", "b")
    assert resolved.run.directory == Path("runs")


@pytest.mark.parametrize("recipe", sorted(config.RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_recipe_is_equal_after_save_and_load(recipe: Path, tmp_path: Path) -> None:
    resolved = load(recipe, ["staleness.k=inf"])
    written = tmp_path / "resolved.toml"
    save(resolved, written)
    again = load(written)
    assert stat.S_IMODE(written.stat().st_mode) == 0o600, "it may hold a secret"
    assert to_table(again) == to_table(resolved)
    assert again.staleness.bounds == resolved.staleness.bounds
    assert again.model_copy(update={"staleness": None}) == resolved.model_copy(update={"staleness": None})


def test_reward_shaping_settings_are_validated_and_unchanged_after_save_and_load() -> None:
    domain = {"name": "d", "source": "addition", "reward": {"mean": "group", "high": 5.0, "low": -math.inf}}
    resolved = parse({**MINIMAL, "domains": [domain]})
    assert resolved.domains[0].reward is not None
    assert resolved.domains[0].reward.shaping == RewardShaping(mean=NormalizationScope.GROUP, high=5.0)
    assert parse(to_table(resolved)).domains == resolved.domains
    with pytest.raises(RecipeError, match=r"^domains.d.reward: reward.low must not exceed high, got 2 and 1$"):
        parse({**MINIMAL, "domains": [{**domain, "reward": {"low": 2.0, "high": 1.0}}]})


def test_recipe_values_cannot_be_assigned_and_the_run_directory_ends_with_the_run_name() -> None:
    resolved: RunConfig = parse({**MINIMAL, "run": {"name": "x", "directory": "/somewhere"}})
    assert resolved.run_directory == Path("/somewhere/x")
    with pytest.raises(ValueError, match="frozen"):
        resolved.run.steps = 3  # type: ignore[misc]


def test_staleness_scope_is_unchanged_after_save_and_load() -> None:
    config = load("tiny", ["staleness.scope=rollout"])
    assert config.staleness.scope is StalenessScope.ROLLOUT
    assert parse(to_table(config)).staleness.scope is StalenessScope.ROLLOUT
    assert "staleness.scope: Input should be 'group' or 'rollout'" in refusal("staleness.scope=token")


@pytest.mark.parametrize(
    ("trainer", "processes"),
    [
        ({}, 1),
        ({"options": {"mesh": {"dp_shard": 2, "dp_replicate": 3}}}, 6),
        ({"options": {"mesh": {"dp_shard": 2}, "distributed": {"coordinator": "10.0.0.1:1"}}}, 1),
        ({"type": "jax", "options": {"mesh": {"fsdp": 2}}}, 1),
    ],
)
def test_launcher_starts_one_process_per_rank_of_a_torch_mesh(trainer: dict[str, object], processes: int) -> None:
    config = parse({"model": {"path": "m"}, "domains": [{"name": "d", "source": "s"}], "trainer": trainer})
    assert config.trainer_processes == processes
    alone = config.in_one_process
    assert alone.trainer_processes == 1
    assert alone.trainer.options == ({} if config.trainer.type == "torch" else trainer["options"])
