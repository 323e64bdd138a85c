"""`gpu_check` on a machine without a GPU: it refuses to pretend, and its rehearsal runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import gpu_attention, gpu_check
from benchmarks.gpu_device import QUICK, Scale
from benchmarks.gpu_trainer import random_batch, step_flops
from pipelinerl.models.tiny_decoder import DecoderShape
from tests.fakes.varlen_kernel import varlen_attention
from trainer_contract.batch import check as check_batch

CPU = torch.device("cpu")
SMALL = replace(QUICK, answer=16, parity_sequences=2, trained_tokens=128, rounds=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_cuda_nothing_was_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == gpu_check.NO_DEVICE == 3
    out, err = capsys.readouterr()
    assert err.strip() == "no CUDA device: nothing was checked"
    assert not out


def test_the_rehearsal_of_what_runs_in_one_process() -> None:
    rows, found = gpu_check.check(CPU, SMALL, ["correctness", "parity", "decode", "trainer"])
    assert not [row.name for row in rows if row.name.endswith("failed")]
    assert found["correctness"]["fp32_max"] < 1e-4
    assert found["parity"]["fp32_max"] < 1e-4
    # Of the CPU's own roofline, measured beside whatever else runs: only the order of magnitude is sure.
    assert 0 < found["decode"]["of_roofline"] < 10
    assert 0 < found["trainer"]["mfu"] < 10


def test_attention_is_compared() -> None:
    """With the kernel's fake, in fp32; the check itself wants CUDA."""
    scale = replace(SMALL, segment=24)
    layers = {each.name: each for each in gpu_attention.layers(varlen_attention, scale, CPU, torch.float32)}
    for layer in layers.values():
        apart = layer.apart()
        assert 0 < apart["varlen"] < 1e-5 and apart["buckets"] == 0.0
    assert len(layers["shared"].drawn[0]) < 0.7 * layers["shared"].tokens
    assert gpu_attention.check_attention(Path(), scale, CPU)[1] == {"checked": False}


@pytest.mark.slow
def test_attention_is_timed() -> None:
    for layer in gpu_attention.layers(varlen_attention, SMALL, CPU, torch.float32):
        assert layer.timed(2).ratio("buckets", "varlen").median > 0


@pytest.mark.slow
def test_the_rehearsal_of_an_optimizers_state_on_the_host() -> None:
    rows, found = gpu_check.check(CPU, SMALL, ["state"])
    assert all(row.met is not False for row in rows) and len(rows) == 6
    assert found["state"]["host"]["apart"] <= 1e-6


@pytest.mark.slow
def test_the_rehearsal_of_an_update_in_flight() -> None:
    rows, found = gpu_check.check(CPU, SMALL, ["update"])
    assert not [row.name for row in rows if row.name.endswith("failed")]
    assert len(found["update"]["seconds"]["pause"]) == SMALL.updates


def test_a_check_that_fails_is_a_missed_row_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: Path, scale: Scale, device: torch.device) -> None:
        raise RuntimeError("no kernel image is available\nlong story")

    monkeypatch.setattr(gpu_check, "CHECKS", {"decode": broken, "trainer": lambda *_: ([], {"mfu": 1.0})})
    rows, found = gpu_check.check(CPU, SMALL, ["decode", "trainer"])
    assert [(row.name, row.value, row.met) for row in rows] == [
        ("decode failed", "RuntimeError: no kernel image is available", False)
    ]
    assert found["trainer"] == {"mfu": 1.0}


def test_floating_point_operations_by_hand() -> None:
    """One layer of width 4 with one head, feed-forward 8, vocabulary 10; segments of known lengths."""
    shape = DecoderShape(hidden=4, layers=1, heads=1, intermediate=8, vocab=10)
    batch = random_batch(replace(SMALL, shape=shape, trained_tokens=64, segment=16))
    check_batch(batch, vocab_size=10)
    lengths = np.bincount(batch.segment_ids)
    weights = 4 * 4 * 4 + 3 * 4 * 8
    expected = 6 * weights * lengths.sum() + 6 * 4 * 10 * batch.loss_mask.sum() + 6 * 4 * (lengths**2).sum()
    assert step_flops(replace(SMALL, shape=shape), batch) == pytest.approx(float(expected))
