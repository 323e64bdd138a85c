"""A torch trainer on several processes: same results as one process, the conformance kit, states, and lost ranks.

Rank 0 runs `tests.fakes.torch_rank0`; the other ranks run `pipelinerl trainer-rank`. gloo connects them.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule

from pipelinerl.plugins.torch_mesh.joining import join
from pipelinerl.system.machine import free_ports
from pipelinerl.trainers.ranks.rendezvous import Distributed
from pipelinerl.trainers.torch.mesh import ProcessMesh, device_index
from pipelinerl.trainers.torch.state import VALUE, ShardFiles, key_of
from pipelinerl.trainers.torch.trainer import TorchTrainer
from tests.fakes import torch_rank0
from tests.families import zoo
from tests.patience import PATIENCE_S
from trainer_contract.conformance import CHECKS, VALUE_CHECKS
from trainer_contract.errors import SpecError
from trainer_contract.types import Device, TrainerSpec

JOINED = {"coordinator": "127.0.0.1:1"}
TWO = {"dp_shard": 2}
#: Context parallelism: both processes share each micro-batch.
CP = {"mesh": {"cp": 2}}
LORA = {"rank": 4, "alpha": 8}
#: Optimizer moments in bf16, with stochastic rounding, take half the memory.
SMALL = {"optimizer": {"moments": "bf16"}}
HOST = {"optimizer": {"place": "host"}}
#: Each process keeps only its rows of the gradients, which are reduced in every backward pass.
DIVIDED = {"gradients": "divided"}
#: Expert parallelism: tokens are sent to the processes that hold their experts.
PARALLEL = {"experts": "parallel"}
#: Models that two processes load, with their heads: tied and untied embeddings, a Conv1D, and a value head.
BEGUN = {"qwen2": "policy", "gpt2": "policy", "llama": "value"}
#: The checks of the conformance kit in which ranks must agree; slow tests run the whole kit.
AGREED = [
    "forward_at_has_no_side_effect",
    "parts_equal_the_whole",
    "non_finite_is_refused",
    "concurrent_reads_see_the_last_step",
]
#: The number of steps of the fast tests of context parallelism; the slow tests take 20.
FEW = 6
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}


@pytest.mark.parametrize(
    ("views", "devices", "local_rank", "indices"),
    [
        ([1, 2, 3], 1, None, [0, 0, 0]),  # as the launcher starts them: each rank sees its own GPU
        ([1, 1, 1], 4, None, [0, 1, 2]),  # started manually on one host
        ([1, 1, 2, 2], 2, None, [0, 1, 0, 1]),  # two ranks on each of two hosts
        ([1, 2, 1], 2, None, [0, 0, 1]),  # rank 1 is on another host than ranks 0 and 2
        ([1, 1], 4, 3, [3, 3]),
        ([1, 2], 1, 1, [0, 0]),
    ],
)
def test_ranks_that_see_the_same_gpus_choose_different_gpus(views, devices, local_rank, indices):
    assert [device_index(rank, views, devices, local_rank) for rank in range(len(views))] == indices


@pytest.mark.parametrize(("devices", "local_rank"), [(1, None), (2, 2)])
def test_device_index_rejects_two_ranks_on_one_gpu(devices, local_rank):
    with pytest.raises(SpecError, match="show each rank its own GPU with CUDA_VISIBLE_DEVICES"):
        device_index(1, [5, 5], devices, local_rank)


def test_several_processes_are_rejected_with_a_torch_that_cannot_abandon_a_pass(monkeypatch):
    monkeypatch.delattr(FSDPModule, "reset_iter_state")
    with pytest.raises(SpecError, match=r"need torch 2\.13.*or train with one process"):
        join(Distributed(coordinator="127.0.0.1:1", processes=2), 1)


@contextmanager
def processes(jobs, *, mesh=TWO, silence_s=20):
    """Start rank 0, which runs the jobs in sequence, and the other ranks; yield all processes."""
    (port,), size = free_ports(1), ProcessMesh(**mesh).size
    options = {"mesh": mesh, "distributed": {"coordinator": f"127.0.0.1:{port}", "silence_s": silence_s}}
    given = [
        (str(directory), what, {**arguments, "options": options | arguments.get("options", {})})
        for directory, what, arguments in jobs
    ]
    argvs = [[sys.executable, "-m", "tests.fakes.torch_rank0", json.dumps(given)]]
    for rank in range(1, size):
        flags = [item for key, value in _settings("trainer.options", options) for item in ("--set", f"{key}={value}")]
        argvs.append([sys.executable, "-m", "pipelinerl.cli", "trainer-rank", "--rank", str(rank), *flags])
    ranks = [
        subprocess.Popen(
            argv, env=os.environ | ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for argv in argvs
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate(timeout=PATIENCE_S)


def _settings(key, value):
    if not isinstance(value, Mapping):
        yield key, json.dumps(value)
        return
    for name, each in value.items():
        yield from _settings(f"{key}.{name}", each)


def ended(rank):
    output, _ = rank.communicate(timeout=PATIENCE_S)
    return rank.returncode, output


def succeed(jobs, **given):
    """Return rank 0's results of each job after every rank has succeeded."""
    with processes(jobs, **given) as ranks:
        for rank in ranks:
            status, output = ended(rank)
            assert status == 0, output
    return [results_in(directory) for directory, _, _ in jobs]


def end_by_losing(rank, how, jobs, **given):
    """Send the signal `how` to one of two ranks during the last job, `until_lost`; return the other rank's output."""
    with processes(jobs, **given) as ranks:
        assert ranks[0].stdout is not None
        output = list[str]()
        for line in ranks[0].stdout:
            if line == "ready\n":
                break
            output.append(line)
        else:
            pytest.fail("".join(output))
        ranks[rank].send_signal(how)
        return ended(ranks[1 - rank])[1]


def results_in(directory):
    return json.loads((directory / "found.json").read_text())


def arrays(directory):
    """Return all arrays that a job saved in the directory: losses, norms, predictions, weights or gradient."""
    return {f"{file.stem}.{key}": array for file in directory.glob("*.npz") for key, array in np.load(file).items()}


def distance(ours, theirs, part):
    """Return the relative L2 distance of two results over all arrays of one part, such as `weights`."""
    names = [name for name in theirs if name.startswith(part)]
    assert names and set(names) <= ours.keys()
    apart = sum(float(((ours[name].astype(np.float64) - theirs[name]) ** 2).sum()) for name in names)
    return float(np.sqrt(apart / sum(float((theirs[name].astype(np.float64) ** 2).sum()) for name in names)))


def contents(state):
    """Return digests of all weights, moments and counts of a state, whole or sharded."""
    tensors = {k: t for k, t in load_file(state / "optimizer.safetensors").items() if not k.startswith("rng")}
    shards = ShardFiles.of(state)
    if shards is None:
        tensors |= load_file(state / "model" / "model.safetensors")
    else:
        for name, (length, *_) in shards.shapes.items():
            for kind in (VALUE, "exp_avg", "exp_avg_sq"):
                tensors[key_of(name, kind)] = shards.rows(name, kind, slice(0, length))
    as_bytes = {key: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for key, tensor in tensors.items()}
    return {key: hashlib.sha256(each).hexdigest() for key, each in as_bytes.items()}


@pytest.fixture(scope="module")
def model(model_path):
    return str(model_path("qwen3"))


@pytest.fixture(scope="module")
def one(model, model_path, tmp_path_factory):
    """Take 30 steps and compute a gradient in this process alone; return the directory of the results."""
    directory = tmp_path_factory.mktemp("one")
    for name in ("lora", "epochs", "mixture"):
        (directory / name).mkdir()
    torch_rank0.train(directory, model=model, options={}, count=30)
    torch_rank0.show(directory, model=model, options={})
    torch_rank0.train(directory / "lora", model=model, options={"lora": LORA})
    torch_rank0.epochs(directory / "epochs", model=model, options={})
    (directory / "padded").mkdir()
    torch_rank0.show(directory / "padded", model=str(zoo.save(directory / "lfm2", "lfm2")), options={})
    torch_rank0.mixture(directory / "mixture", model=str(model_path("qwen3_moe")), options={})
    return directory


@pytest.fixture(scope="module")
def begun(model_path):
    return [[str(model_path(name)), head] for name, head in BEGUN.items()]


@pytest.fixture(scope="module")
def two(model, model_path, begun, tmp_path_factory):
    """Take the first 20 steps and the gradient in two processes, run some checks of the kit, then kill rank 1.

    One process resumes their state and takes 5 steps, and two processes resume that state and take 5 more.
    """
    directory = tmp_path_factory.mktemp("two")
    unstepped, recurrent = (str(zoo.save(directory / name, name)) for name in ("laguna", "lfm2"))
    experts = str(model_path("qwen3_moe"))

    def job(name, what, *, model=model, restored=None, **given):
        """Return a job on `model`; `restored` names the job whose state it resumes."""
        given |= {} if restored is None else {"restore_from": str(directory / restored / "state")}
        return directory / name, what, {"model": model} | given

    kit = {"models": [[model, "policy"]]}
    jobs = [
        job("", "train"),
        job("alone", "train_alone", first=20, count=5, restored=""),
        job("resaved", "resave", restored="alone"),
        job("again", "train", first=25, count=5, restored="alone"),
        job("", "show"),
        (directory / "kit", "kit", kit | {"names": AGREED}),
        job("cp", "train", count=FEW, options=CP),
        job("cp", "show", options=CP),
        job("back", "train", first=20, count=1, restored=""),
        job("lora", "train", options={"lora": LORA}),
        job("lora_cp", "train", count=2, options=CP | {"lora": LORA}),
        job("epochs", "epochs"),
        (directory / "begin", "begin", {"models": begun}),
        job("served", "served"),
        job("refused", "refused", restored=""),
        job("divided", "show", options=DIVIDED),
        (directory / "divided_kit", "kit", kit | {"names": ["non_finite_is_refused"], "options": DIVIDED}),
        job("small", "train", count=3, options=SMALL),
        job("small_back", "train", first=3, count=1, options=SMALL, restored="small"),
        job("mixture", "mixture", model=experts),
        job("mixture_cp", "mixture", model=experts, options=CP),
        job("mixture_parallel", "mixture", model=experts, options=PARALLEL),
        job("padded", "show", model=recurrent),
        job("unstepped", "train", model=unstepped, count=2),
        job("unstepped_back", "train", model=unstepped, first=2, count=1, restored="unstepped"),
        job("lost", "until_lost"),
    ]
    return directory, end_by_losing(1, signal.SIGKILL, jobs)


@pytest.mark.timeout(600)
def test_20_steps_of_two_processes_match_those_of_one_process(one, two):
    """With five micro-batches a step, the second process has two and computes dummy tokens in the last round."""
    ours, theirs = arrays(two[0]), arrays(one)
    losses = theirs["steps.losses"][:20]
    assert np.abs(ours["steps.losses"] - losses).max() <= 1e-6
    assert np.abs(ours["steps.norms"] / theirs["steps.norms"][:20] - 1).max() <= 2e-6
    assert distance(ours, theirs, "gradient") <= 2e-6
    assert np.abs(losses[-1] - losses[0]) > 1e-3, "the run goes somewhere"


@pytest.mark.timeout(600)
def test_context_parallel_steps_match_one_process(one, two):
    """Rollouts share the computation of prompts, as in one process; key heads are repeated if there are too few."""
    ours, theirs = arrays(two[0] / "cp"), arrays(one)
    assert np.abs(ours["steps.losses"] - theirs["steps.losses"][:FEW]).max() <= 1e-6
    assert np.abs(ours["steps.predictions"] - theirs["steps.predictions"][:FEW]).max() <= 1e-5
    assert distance(ours, theirs, "gradient") <= 2e-6


@pytest.mark.timeout(600)
def test_20_steps_of_adapters_over_a_sharded_base_match_one_process(one, two):
    """Rank 0 merges weights for engines from the rows of the base, of A and of B."""
    ours, theirs = arrays(two[0] / "lora"), arrays(one / "lora")
    assert np.abs(ours["steps.losses"] - theirs["steps.losses"]).max() <= 1e-6
    assert np.abs(ours["steps.norms"] / theirs["steps.norms"] - 1).max() <= 1e-5
    shared = arrays(two[0] / "lora_cp")["steps.losses"]
    assert np.abs(shared - theirs["steps.losses"][: len(shared)]).max() <= 1e-6
    assert distance(ours, theirs, "weights") <= 1e-6
    assert distance(theirs, arrays(one), "weights") > 1e-3, "the base stands still"
    saved = {str(path.relative_to(two[0] / "lora")) for path in (two[0] / "lora" / "state").rglob("*.*")}
    assert saved == {str(path.relative_to(one / "lora")) for path in (one / "lora" / "state").rglob("*.*")}


@pytest.mark.timeout(600)
def test_two_processes_match_one_process_with_several_optimizer_steps_per_batch(one, two):
    ours, theirs = arrays(two[0] / "epochs"), arrays(one / "epochs")
    assert theirs["epochs.losses"].shape == (18,) and theirs["epochs.clipped"].max() > 0.1
    assert np.abs(ours["epochs.losses"] - theirs["epochs.losses"]).max() <= 1e-6
    assert distance(ours, theirs, "weights") <= 1e-6


@pytest.mark.timeout(600)
def test_run_of_two_processes_resumes_on_one_process_and_on_two_processes(one, two):
    """The state does not depend on the number of processes; each resumed run continues as if uninterrupted."""
    losses = arrays(one)["steps.losses"]
    for name, steps in (("alone", slice(20, 25)), ("again", slice(25, 30))):
        assert np.abs(arrays(two[0] / name)["steps.losses"] - losses[steps]).max() <= 1e-6
    assert distance(arrays(two[0] / "again"), arrays(one), "weights") <= 1e-6


@pytest.mark.timeout(600)
def test_trainer_state_saved_by_rows_loads_bit_for_bit_on_any_number_of_processes(model, two, tmp_path):
    """Also checks that states contain no pickle and that each process saves its own rows."""
    state = two[0] / "state"
    assert {path.suffix for path in state.rglob("*") if path.is_file()} == {".safetensors", ".json"}
    sizes = [file.stat().st_size for file in sorted((state / "shards").glob("*.safetensors"))]
    assert len(sizes) == 2 and max(sizes) < 1.2 * min(sizes)
    torch_rank0.resave(tmp_path / "one", model=model, options={}, restore_from=str(state))
    assert contents(tmp_path / "one" / "state") == contents(state)
    assert contents(two[0] / "resaved" / "state") == contents(two[0] / "alone" / "state")


@pytest.mark.timeout(600)
def test_run_resumes_bit_for_bit_on_the_same_number_of_processes(two):
    before, after = arrays(two[0]), arrays(two[0] / "back")
    assert np.isfinite(before["steps.next"]).all()
    np.testing.assert_array_equal(before["steps.next"].sum(), after["steps.losses"][0])


@pytest.mark.timeout(600)
def test_model_loaded_by_rows_on_two_processes_equals_that_of_one_process_bit_for_bit(two, begun, tmp_path):
    torch_rank0.begin(tmp_path, models=begun, options={})
    ours, theirs = arrays(two[0] / "begin"), arrays(tmp_path)
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)


@pytest.mark.timeout(600)
def test_error_on_one_process_is_raised_on_all_processes_which_then_continue(two):
    """Only the second process opens the damaged shard."""
    assert results_in(two[0] / "refused")["error"].startswith("rank 1: the trainer state in")


@pytest.mark.timeout(600)
def test_two_processes_that_reduce_gradients_in_every_backward_match_one_process(one, two):
    """The two processes compute the five micro-batches of a step in three rounds."""
    assert distance(arrays(two[0] / "divided"), arrays(one), "gradient") <= 2e-6
    assert results_in(two[0] / "divided_kit") == {"qwen3 policy": {"non_finite_is_refused": ""}}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_20_steps_with_memory_saving_options_match_one_process(one, model, tmp_path):
    kinds = {
        "host": {"options": HOST},
        "divided": {"options": DIVIDED},
        "checkpointed": {"checkpointing": True},
    }
    succeed([(tmp_path / name, "train", {"model": model, **each}) for name, each in kinds.items()])
    for name in kinds:
        ours, theirs = arrays(tmp_path / name), arrays(one)
        assert np.abs(ours["steps.losses"] - theirs["steps.losses"][:20]).max() <= 1e-6
        assert np.abs(ours["steps.norms"] / theirs["steps.norms"][:20] - 1).max() <= 2e-6


@pytest.mark.timeout(600)
def test_bf16_moments_of_two_processes_load_bit_for_bit_on_one_process(model, two, tmp_path):
    small = two[0] / "small"
    kept = ShardFiles.of(small / "state")
    assert kept is not None and kept.rows("model.norm.weight", "exp_avg", slice(0, 1)).dtype is torch.bfloat16
    torch_rank0.resave(tmp_path / "one", model=model, options=SMALL, restore_from=str(small / "state"))
    assert contents(tmp_path / "one" / "state") == contents(small / "state")
    np.testing.assert_array_equal(arrays(small)["steps.next"].sum(), arrays(two[0] / "small_back")["steps.losses"][0])


def test_forward_and_backward_of_two_processes_use_the_rounded_weights_that_engines_serve(model, two, tmp_path):
    assert results_in(two[0] / "served") == [True, True]
    torch_rank0.served(tmp_path, model=model, options={})
    np.testing.assert_allclose(
        arrays(two[0] / "served")["served.predictions"], arrays(tmp_path)["served.predictions"], rtol=0, atol=1e-2
    )


def test_conformance_checks_in_which_ranks_must_agree_pass_on_two_processes(two):
    assert results_in(two[0] / "kit") == {"qwen3 policy": dict.fromkeys(AGREED, "")}


def test_torch_rank_0_error_names_a_killed_rank(two):
    assert "RankError: rank 1 is gone" in two[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_torch_rank_0_error_names_a_hanging_rank(model, tmp_path):
    jobs = [(tmp_path, "until_lost", {"model": model})]
    assert "RankError: rank 1 sent nothing for 5 s" in end_by_losing(1, signal.SIGSTOP, jobs, silence_s=5)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", ["mixture", "mixture_cp", "mixture_parallel"])
def test_sharded_experts_with_given_routing_match_one_process(one, two, part):
    """With the parameter `mixture_parallel`, each process keeps some experts, and tokens are sent to their experts."""
    ours, theirs = arrays(two[0] / part), arrays(one / "mixture")
    for name in ("losses", "predictions", "free"):
        assert np.abs(ours[f"mixture.{name}"] - theirs[f"mixture.{name}"]).max() <= 1e-5, name
    assert np.abs(theirs["mixture.free"] - theirs["mixture.predictions"][-1]).max() > 1e-3, "the routing is obeyed"
    assert distance(ours, theirs, "weights") <= 1e-4


@pytest.mark.timeout(600)
def test_two_processes_that_train_a_recurrent_model_as_padded_rows_match_one_process(one, two):
    assert distance(arrays(two[0] / "padded"), arrays(one / "padded"), "gradient") <= 1e-5


@pytest.mark.timeout(600)
def test_sharded_trainer_with_parameters_that_have_no_gradient_resumes_bit_for_bit(two):
    """The bias that only selects experts has no optimizer state."""
    before, after = (arrays(two[0] / name) for name in ("unstepped", "unstepped_back"))
    assert before["steps.next"].sum() == pytest.approx(after["steps.losses"][0], abs=1e-7)
    stepped = load_file(two[0] / "unstepped_back" / "state" / "optimizer.safetensors")
    counts = {name.removesuffix(".step"): float(each) for name, each in stepped.items() if name.endswith(".step")}
    assert set(counts.values()) == {3.0} and not any("e_score_correction_bias" in name for name in stepped)


@pytest.mark.timeout(600)
def test_checkpoint_of_sharded_experts_has_the_tensors_of_the_model_directory(one, two, model_path):
    """Each expert has its own matrices there, as in the directory that the trainers loaded."""
    original, theirs = (load_file(path / "model.safetensors") for path in (model_path("qwen3_moe"), one / "mixture"))
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in original
    for part in ("mixture", "mixture_parallel"):
        ours = load_file(two[0] / part / "model.safetensors")
        assert {name: each.shape for name, each in ours.items()} == {
            name: each.shape for name, each in original.items()
        }
        assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) <= 1e-4
    assert not torch.equal(theirs["lm_head.weight"], original["lm_head.weight"])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "mesh", [TWO, {"dp_replicate": 2}, {"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"cp": 2}, {"cp": 4}]
)
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama", "mistral", "gpt2", "qwen3_moe"])
def test_conformance_kit_passes_on_every_torch_mesh(name, mesh, model_path, tmp_path):
    models = [[str(model_path(name)), head] for head in ("policy", "value")]
    (reasons,) = succeed([(tmp_path, "kit", {"models": models})], mesh=mesh)
    for head, suite in (("policy", CHECKS), ("value", VALUE_CHECKS)):
        assert reasons[f"{name} {head}"] == {check.__name__: "" for check in suite}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mesh", [TWO, {"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "cp": 2}])
def test_experts_distributed_over_processes_match_one_process(mesh, one, model_path, tmp_path):
    model = str(model_path("qwen3_moe"))
    jobs = [
        (tmp_path / "mixture", "mixture", {"model": model, "options": PARALLEL}),
        (tmp_path / "kit", "kit", {"models": [[model, "policy"]], "options": PARALLEL}),
    ]
    _, reasons = succeed(jobs, mesh=mesh)
    ours, theirs = arrays(tmp_path / "mixture"), arrays(one / "mixture")
    for name in ("losses", "predictions", "free"):
        assert np.abs(ours[f"mixture.{name}"] - theirs[f"mixture.{name}"]).max() <= 1e-5, name
    assert distance(ours, theirs, "weights") <= 1e-4
    assert reasons == {"qwen3_moe policy": {check.__name__: "" for check in CHECKS}}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "mesh",
    [
        {"dp_replicate": 2},
        {"dp_shard": 3},
        {"dp_replicate": 2, "dp_shard": 2},
        {"cp": 2},
        {"cp": 4},
        {"dp_shard": 2, "cp": 2},
        {"dp_replicate": 2, "cp": 2},
        {"dp_shard": 9},  # the last process has no rows of any parameter
    ],
)
def test_20_steps_on_replicated_sharded_and_context_parallel_meshes_match_one_process(mesh, one, model, tmp_path):
    succeed([(tmp_path, "train", {"model": model}), (tmp_path, "show", {"model": model})], mesh=mesh)
    ours, theirs = arrays(tmp_path), arrays(one)
    assert np.abs(ours["steps.losses"] - theirs["steps.losses"][:20]).max() <= 1e-6
    assert distance(ours, theirs, "gradient") <= 2e-6


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mush": 1}, "options.mush is unknown to the torch trainer; it knows mesh, gradients, experts, attention"),
        ({"mesh": {"fsdp": 2}}, "options.mesh.fsdp is unknown to the torch trainer; it knows dp_replicate, dp_shard"),
        ({"gradients": "half"}, "options.gradients must be whole or divided, got 'half'"),
        ({"mesh": {"dp_replicate": 2}} | PARALLEL, 'options.experts = "parallel" needs a sharded model'),
        ({"mesh": {"dp_shard": 0}}, "options.mesh.dp_shard must be a whole number of at least 1, got 0"),
        (
            {"mesh": {"cp": 2}},
            "options.mesh makes 2 processes, but options.distributed does not name their meeting point",
        ),
        ({"mesh": TWO}, "options.mesh makes 2 processes, but options.distributed does not name their meeting point"),
        ({"distributed": JOINED}, "options.distributed is for several processes, but options.mesh has one"),
        ({"mesh": TWO, "distributed": JOINED | {"processes": 3}}, "processes must be 2, as options.mesh says, got 3"),
        ({"mesh": TWO, "distributed": {"coordinator": "10.0.0.1:1"}}, "token_file must be given where coordinator is"),
        ({"mesh": TWO, "distributed": JOINED | {"process": 1}}, "only rank 0 is a trainer; start `pipelinerl trainer-"),
    ],
)
def test_torch_trainer_rejects_invalid_options_by_name(options, sentence, model_path):
    spec = TrainerSpec(model_path=model_path("qwen3"), device=Device.CPU, options=options)
    with pytest.raises(SpecError, match="^.*" + sentence.replace("(", r"\(")):
        TorchTrainer().init_worker(spec)
