"""A JAX trainer on two processes: same results as one process, the conformance kit, states, lost and missing ranks.

Rank 0 runs `tests.fakes.jax_rank0`, and rank 1 runs `pipelinerl trainer-rank`. Each process has one CPU device; gloo
connects them.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from pipelinerl.objective.presets import resolve
from pipelinerl.plugins.jax.trainer import trainer as jax_trainer
from pipelinerl.plugins.jax.trainer.mesh import join
from pipelinerl.plugins.jax.trainer.trainer import JaxTrainer
from pipelinerl.system.machine import free_ports
from pipelinerl.trainers.ranks import commands as wire
from pipelinerl.trainers.ranks.rank0 import Ranks, lead
from pipelinerl.trainers.ranks.rendezvous import Distributed, join_rank0
from tests.fakes import jax_rank0
from tests.patience import PATIENCE_S
from trainer_contract.conformance import CHECKS
from trainer_contract.conformance.probes import LINEAR
from trainer_contract.errors import RankError, SpecError
from trainer_contract.types import Device, MicroBatch, TrainerSpec

#: Seconds of silence after which the trainer under test counts a rank as lost.
SILENCE_S = 5
ENVIRONMENT = {
    "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1",  # the last flag wins
    "OMP_NUM_THREADS": "1",
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # each rank compiles its own programs, as on hosts without a shared disk
}


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname(), timeout=PATIENCE_S)
        return server.accept()[0], theirs


@contextmanager
def pair(model, directory, *what):
    """Start rank 0, which performs the jobs `what` in sequence, and rank 1; yield both processes."""
    (port,) = free_ports(1)
    rank0 = [sys.executable, "-m", "tests.fakes.jax_rank0", str(model), str(port), str(directory), *what]
    distributed = f'{{coordinator="127.0.0.1:{port}",processes=2,timeout_s=240,silence_s={SILENCE_S}}}'
    changes = ["--set", 'trainer.type="jax"', "--set", f"trainer.options={{distributed={distributed}}}"]
    rank1 = [sys.executable, "-m", "pipelinerl.cli", "trainer-rank", "--rank", "1", *changes]
    ranks = [
        subprocess.Popen(
            argv, env=os.environ | ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for argv in (rank0, rank1)
    ]
    try:
        yield ranks[0], ranks[1]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate(timeout=PATIENCE_S)


def ended(rank, timeout_s):
    output, _ = rank.communicate(timeout=timeout_s)
    return rank.returncode, output


def until_ready(rank0):
    assert rank0.stdout is not None
    assert any(line == "ready\n" for line in rank0.stdout), "rank 0 ended before both ranks had made a forward pass"


@pytest.fixture(scope="module")
def until_killed(model_path, tmp_path_factory):
    """Return the directory of `jax_rank0.results`, and rank 0's output after rank 1 was killed."""
    directory = tmp_path_factory.mktemp("two")
    with pair(model_path("qwen3"), directory, "results", "wait") as (rank0, rank1):
        until_ready(rank0)
        rank1.kill()
        _, output = ended(rank0, PATIENCE_S)
    return directory, output


@pytest.fixture(scope="module")
def two_processes(until_killed):
    return until_killed[0]


def close(ours, theirs, tolerance):
    assert ours.keys() == theirs.keys()
    for name, right in theirs.items():
        np.testing.assert_allclose(ours[name], right, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.timeout(300)
def test_jax_step_on_two_processes_matches_one_process(two_processes, model_path):
    """The test compares losses, log-probs, norm and gradient, which a step with eps = 1 shows in the weights."""
    one = jax_rank0.started(model_path("qwen3"), {})
    before = {name: array.copy() for name, array in one.gather_weights()}
    alone, together = jax_rank0.one_step(one), dict(np.load(two_processes / "first.npz"))
    close(together, alone, 1e-6)
    moved = {name: np.abs(together[name] - before[name]).max() for name in before}
    assert min(moved.values()) > 1e-4, "each parameter has a gradient, far above the tolerance"


@pytest.mark.timeout(300)
def test_jax_state_of_two_processes_resumes_on_one_process(two_processes, model_path):
    parts = list((two_processes / "state/arrays/mean/model.embed_tokens.weight").rglob("c/*/*"))
    assert len(parts) == 2, "each process wrote its own"
    restored = jax_rank0.started(model_path("qwen3"), {}, restore_from=two_processes / "state")
    assert restored.model_version == 1
    first = dict(np.load(two_processes / "first.npz"))
    assert all(np.array_equal(array, first[name]) for name, array in restored.gather_weights()), "to the bit"
    close(jax_rank0.one_step(restored), dict(np.load(two_processes / "second.npz")), 1e-6)


@pytest.mark.timeout(300)
def test_forward_at_uses_the_given_weights_on_every_rank(two_processes):
    assert json.loads((two_processes / "forward_at.json").read_text()), "forward_at, to the bit"


@pytest.mark.timeout(300)
def test_error_that_is_raised_on_all_jax_ranks_is_reported_and_training_continues(two_processes):
    message, together = json.loads((two_processes / "refusal.json").read_text())
    assert "advantage" in message and together


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_jax_trainer_on_two_processes_passes_the_conformance_kit(model_path, tmp_path):
    with pair(model_path("qwen3"), tmp_path, "kit") as (rank0, rank1):
        status, output = ended(rank0, PATIENCE_S)
        assert status == 0, output
        status, output = ended(rank1, PATIENCE_S)
        assert status == 0, output
    results = json.loads((tmp_path / "kit.json").read_text())
    assert results == {check.__name__: "" for check in CHECKS}


@pytest.mark.timeout(300)
def test_rank_0_error_names_a_killed_rank(until_killed):
    assert "RankError: rank 1 is gone" in until_killed[1]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        (signal.SIGKILL, "rank 0 is gone"),
        pytest.param(signal.SIGSTOP, "rank 0 sent nothing for 5 s", marks=pytest.mark.slow),
    ],
)
def test_other_ranks_end_when_rank_0_dies_or_hangs(how, sentence, model_path, tmp_path):
    with pair(model_path("qwen3"), tmp_path, "wait") as (rank0, rank1):
        until_ready(rank0)
        rank0.send_signal(how)
        status, output = ended(rank1, PATIENCE_S)
    assert (status, "pipelinerl: " + sentence in output) == (1, True), output


# --- gathers and passes ------------------------------------------------------------


@pytest.mark.timeout(120)
def test_gather_runs_between_the_micro_batches_of_a_backward_call(model_path, micro_batch, monkeypatch):
    ours, theirs = tcp_pair()
    ranks = Ranks({1: wire.Channel(ours, peer="rank 1", silence_s=PATIENCE_S)}, timeout_s=PATIENCE_S)
    rank1 = wire.Channel(theirs, peer="rank 0", silence_s=PATIENCE_S)
    monkeypatch.setattr(jax_trainer, "lead", lambda distributed, join: ranks)
    options = {"mesh": {"fsdp": 2}, "distributed": {"coordinator": "127.0.0.1:1", "processes": 2}}
    spec = TrainerSpec(model_path=model_path("qwen3"), device=Device.CPU, options=options)
    trainer, commands = JaxTrainer(), []

    def received():
        message = wire.decode(rank1.receive())
        commands.append(type(message.command))
        return message.number

    def answer(number):
        rank1.send(wire.encode(wire.RankAnswer(number)))

    with ThreadPoolExecutor(2) as threads:
        starting = threads.submit(trainer.init_worker, spec)
        answer(received())
        starting.result(PATIENCE_S)
        backward = threads.submit(trainer.backward, [micro_batch()] * 3, LINEAR)
        first = received()
        gathered = threads.submit(next, trainer.gather_weights())
        gather = received()
        answer(first)
        answer(gather)
        name, _ = gathered.result(PATIENCE_S)
        assert (name, backward.done()) == (trainer.weight_layout()[0].name, False)
        for _ in range(2):
            answer(received())
        assert len(backward.result(PATIENCE_S)) == 3
    assert commands == [wire.StartCommand, wire.Backward, wire.Gather, wire.Backward, wire.Backward]
    ranks.end()
    rank1.close()


# --- finding one another ------------------------------------------------------------


def test_rank_1_error_says_that_rank_0_does_not_answer():
    distributed = Distributed(coordinator=f"127.0.0.1:{free_ports(1)[0]}", processes=2, process=1, timeout_s=1)
    with pytest.raises(SpecError, match=r"rank 0 does not answer at 127.0.0.1:\d+ within 1 s"):
        join_rank0(distributed, join)


@pytest.mark.parametrize(
    ("fields", "token", "sentence"),
    [
        ({"process": 1}, "other", "its token differs from the one in token_file here"),
        ({"process": 1, "processes": 4}, "secret", r"it is rank 1 of 4, expected one of 1..2 of 3"),
    ],
)
def test_rank_0_still_waits_for_other_ranks_after_it_has_rejected_a_rank(fields, token, sentence, tmp_path):
    paths = {name: tmp_path / name for name in ("secret", "other")}
    for name, path in paths.items():
        path.write_text(json.dumps({"token": name}))
    common = {"coordinator": f"127.0.0.1:{free_ports(1)[0]}", "processes": 3, "timeout_s": 5, "silence_s": 1}
    messages = []

    def wait_for_ranks():
        try:
            lead(Distributed(**common, token_file=str(paths["secret"])), join)
        except SpecError as error:
            messages.append(str(error))

    waiting = threading.Thread(target=wait_for_ranks)
    waiting.start()
    with pytest.raises(SpecError, match="rank 0 rejects rank 1: " + sentence):
        join_rank0(Distributed(**common | fields, token_file=str(paths[token])), join)
    waiting.join(PATIENCE_S)
    assert "rank 1, 2 did not connect to 127.0.0.1" in messages[0] and "within 5 s; start `pipelinerl" in messages[0]


# --- messages ------------------------------------------------------------


def test_rank_commands_are_unchanged_by_encoding_and_decoding(micro_batch, model_path):
    batch = micro_batch()
    again = wire.decode_batch(wire.encode_batch(batch))
    for name in MicroBatch.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(again, name), getattr(batch, name))
    options = {"mesh": {"fsdp": 2}, "distributed": {"process": 0}}
    spec = TrainerSpec(model_path=model_path("qwen3"), options=options)
    assert wire.decode_spec(wire.encode_spec(spec)).model_path == spec.model_path
    assert wire.decode_spec(wire.encode_spec(spec)).options == {"mesh": {"fsdp": 2}}, (
        "each rank has its own `distributed`"
    )
    for objective in (resolve("grpo"), resolve("pipelinerl"), LINEAR):
        assert wire.decode_objective(wire.encode_objective(objective)) == objective


def test_ranks_decode_only_classes_that_are_part_of_an_objective():
    with pytest.raises(RankError, match="'os:_exit', which is not part of an objective"):
        wire.decode_objective({"class": "os:_exit", "fields": {}})
    with pytest.raises(RankError, match="which is not part of an objective"):
        wire.decode_objective({"class": "pipelinerl.objective.presets:resolve", "fields": {"choice": "grpo"}})
    with pytest.raises(SpecError, match="got builtins:object; train on one process"):
        wire.encode_objective(object())
    with pytest.raises(RankError, match="cannot be decoded"):
        wire.decode(b"\x80")


def test_peer_that_sends_only_heartbeats_does_not_time_out():
    ours, theirs = tcp_pair()
    listening, beating = (wire.Channel(end, peer="rank 1", silence_s=1.5) for end in (ours, theirs))
    beating.beat()
    threading.Timer(3.5, lambda: beating.send(wire.encode(wire.Refused("late")))).start()
    began = time.monotonic()
    assert wire.decode(listening.receive()) == wire.Refused("late")
    assert time.monotonic() - began > 2.0
    beating.close()
    with pytest.raises(RankError, match="rank 1 is gone: it ended the connection"):
        listening.receive()
    listening.close()


def test_channel_raises_an_error_if_its_peer_is_silent_or_sends_an_oversized_message():
    ours, theirs = tcp_pair()
    listening, silent = (wire.Channel(end, peer="rank 1", silence_s=0.3) for end in (ours, theirs))
    with pytest.raises(RankError, match=r"rank 1 sent nothing for 0.3 s"):
        listening.receive()
    silent.send(wire.encode(wire.Hello(1, 2, "x" * 100)))
    with pytest.raises(RankError, match="at most 50 are expected"):
        listening.receive(most_bytes=50)
    for end in (listening, silent):
        end.close()
