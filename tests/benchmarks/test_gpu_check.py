"""`gpu_check` on a machine without a GPU: it refuses to check, but its rehearsal on the CPU (`--device cpu`) runs."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_device import QUICK, save_model
from benchmarks.gpu_trainer import random_batch, step_flops
from benchmarks.measure import Row
from pipelinerl.plugins.warmstart.tiny_decoder import DecoderShape
from trainer_contract.batch import check as check_batch

CPU = torch.device("cpu")
SMALL = replace(QUICK, answer=16, parity_sequences=2, trained_tokens=128, rounds=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_gpu_check_without_cuda_checks_nothing(capsys):
    assert gpu_check.main([]) == gpu_check.NO_DEVICE == 3
    out, err = capsys.readouterr()
    assert err.strip() == "no CUDA device: nothing was checked"
    assert not out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_model(SMALL, path)
    return path


@pytest.mark.parametrize("part", ["correctness", "parity"])
def test_gpu_check_rehearsal_finds_equal_logprobs_in_engine_transformers_and_trainer(part, folder):
    rows, result = gpu_check.attempt(part, folder, SMALL, CPU)
    assert not [row.name for row in rows if row.name.endswith("failed")]
    assert result["fp32_max"] < 1e-4


@pytest.mark.parametrize(
    ("part", "figure"),
    [("decode", "of_roofline"), ("trainer", "mfu"), ("ragged", "bf16_excess"), ("staging", "peak_share")],
)
def test_gpu_check_rehearsal_measures_speeds_and_memory_of_plausible_magnitude(part, figure, folder):
    rows, result = gpu_check.attempt(part, folder, SMALL, CPU)
    assert not [row.name for row in rows if row.name.endswith("failed")]
    assert 0 < result[figure] < 10, "only the order of magnitude is certain on a busy CPU"


@pytest.mark.slow
def test_gpu_check_rehearsal_runs_to_the_end_and_records_each_part(tmp_path, capsys):
    assert gpu_check.main(["--device", "cpu", "--quick", "--results", str(tmp_path)]) == 0
    checks = json.loads((tmp_path / "gpu_check.json").read_text())["checks"]
    assert list(checks) == list(gpu_check.CHECKS)
    messages = capsys.readouterr().err
    assert all(f"gpu_check: {part} …" in messages for part in checks)


def test_gpu_check_part_that_raises_an_error_is_recorded_as_failed(monkeypatch):
    def broken(*_):
        raise AttributeError("no kernel image is available\nlong story")

    monkeypatch.setattr(gpu_check, "CHECKS", {"decode": broken})
    ((row,), result) = gpu_check.attempt("decode", Path(), SMALL, CPU)
    assert (row.name, row.met) == ("decode failed", False)
    assert str(row.value).startswith("AttributeError: ") and "long story" not in str(row.value)
    assert "long story" in result["failed"]


def test_hanging_gpu_check_part_is_killed_and_the_next_one_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "LIMIT_S", 0.01)
    seen = []
    rows, results = gpu_check.check(CPU, SMALL, ["decode", "mesh"], lambda parts: seen.append(list(parts)))
    assert [row.name for row in rows] == ["decode failed", "mesh failed"]
    assert "no result after 0.01 s" in results["decode"]["failed"]
    assert seen == [["decode"], ["decode", "mesh"]], "the record is written after each part"


def test_rerun_of_one_gpu_check_part_keeps_the_results_of_other_parts_with_the_same_settings(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "apart", lambda part, *_: ([Row(part, 1.0)], {"figure": part}))
    monkeypatch.setattr(gpu_check, "save_model", lambda *_: None)
    for part in ("decode", "memory"):
        gpu_check.main(["--device", "cpu", "--quick", "--only", part, "--results", str(tmp_path)])
    checks = json.loads((tmp_path / "gpu_check.json").read_text())["checks"]
    assert {name: each["figure"] for name, each in checks.items()} == {"decode": "decode", "memory": "memory"}
    gpu_check.main(["--device", "cpu", "--only", "decode", "--results", str(tmp_path)])
    assert list(json.loads((tmp_path / "gpu_check.json").read_text())["checks"]) == ["decode"]


def test_step_flops_of_a_known_shape_match_a_hand_computed_number():
    """The model has one layer of width 4 with one head, a feed-forward width of 8, and a vocabulary of 10."""
    shape = DecoderShape(hidden=4, layers=1, heads=1, intermediate=8, vocab=10)
    batch = random_batch(replace(SMALL, shape=shape, trained_tokens=64, segment=16))
    check_batch(batch, vocab_size=10)
    lengths = np.bincount(batch.segment_ids)
    weights = 4 * 4 * 4 + 3 * 4 * 8
    expected = 6 * weights * lengths.sum() + 6 * 4 * 10 * batch.loss_mask.sum() + 6 * 4 * (lengths**2).sum()
    assert step_flops(replace(SMALL, shape=shape), batch) == pytest.approx(float(expected))
