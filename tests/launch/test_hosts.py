"""A host's GPUs are read from the output of `nvidia-smi`, the driver's files, and CUDA_VISIBLE_DEVICES."""

import os
import stat

import pytest

from launch import hosts as counting
from launch.hosts import Devices, VisibleDevice, devices_for, read_devices
from pipelinerl.config.recipe import load
from pipelinerl.errors import UserError

TWO = "0, GPU-11aa, 81559, Disabled\n1, GPU-22bb, 81559, Disabled\n"
UNEQUAL = "0, GPU-11aa, 24564, [N/A]\n1, GPU-22bb, 81559, [N/A]\n"
DIVIDED = "0, GPU-11aa, 81559, Enabled\n1, GPU-22bb, 81559, Disabled\n"
LISTING = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-11aa)
  MIG 3g.40gb     VisibleDevice  0: (UUID: MIG-c6d4)
  MIG 3g.40gb     VisibleDevice  1: (UUID: MIG-cba6)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-22bb)
"""


def test_every_gpu_in_the_output_of_nvidia_smi_is_listed():
    assert read_devices(TWO) == Devices((VisibleDevice("0", 81559), VisibleDevice("1", 81559)))
    assert read_devices("") == Devices()
    assert read_devices(TWO).environment((1, 0)) == {"CUDA_VISIBLE_DEVICES": "1,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert read_devices(TWO).environment(()) == {}


def test_instances_of_a_gpu_in_mig_mode_are_listed_as_devices():
    detected = read_devices(DIVIDED, instances=LISTING)
    assert [device.name for device in detected.each] == ["MIG-c6d4", "MIG-cba6", "1"]
    assert detected.label(0) == "GPU 0 (MIG-c6d4)"


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        ("1", [VisibleDevice("1", 81559)]),
        ("1, 0", [VisibleDevice("1", 81559), VisibleDevice("0", 81559)]),
        ("GPU-22,0", [VisibleDevice("GPU-22", 81559), VisibleDevice("0", 81559)]),
        ("MIG-c6d4", [VisibleDevice("MIG-c6d4")]),
        ("0,-1,1", [VisibleDevice("0", 81559)]),
        ("", []),
        ("NoDevFiles", []),
    ],
)
def test_only_gpus_in_cuda_visible_devices_are_listed(visible, devices):
    detected = read_devices(TWO, visible=visible)
    assert (list(detected.each), detected.chosen_by_user) == (devices, True)
    assert "CUDA_DEVICE_ORDER" not in detected.environment(range(len(devices))), (
        "the order of the user's indices is kept"
    )


def test_gpu_memory_is_unknown_if_gpus_differ_and_are_named_by_index():
    assert read_devices(UNEQUAL, visible="0").each == (VisibleDevice("0"),)
    assert read_devices(UNEQUAL, visible="GPU-22bb").each == (VisibleDevice("GPU-22bb", 81559),)


@pytest.mark.parametrize("visible", ["2", "GPU-33"])
def test_unknown_device_in_cuda_visible_devices_is_rejected(visible):
    with pytest.raises(
        UserError, match=rf"CUDA_VISIBLE_DEVICES names {visible}, and this machine has the GPUs 0 \(GPU-1"
    ):
        read_devices(TWO, visible=visible)
    assert read_devices("", visible=visible).each == (), "without GPUs, CUDA_VISIBLE_DEVICES names no device"


def on_path(folder, script, monkeypatch):
    """Create a program named `nvidia-smi` that runs `script`, and put its folder first on PATH."""
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_gpus_are_read_from_the_nvidia_smi_program_on_the_path(tmp_path, monkeypatch):
    script = f"case $1 in -L) cat <<'E'\n{LISTING}E\n;; *) cat <<'E'\n{DIVIDED}E\n;; esac"
    on_path(tmp_path / "bin", script, monkeypatch)
    assert devices_for(load("tiny"), {}) == read_devices(DIVIDED, instances=LISTING)
    assert devices_for(load("tiny"), {"CUDA_VISIBLE_DEVICES": "1"}).each == (VisibleDevice("1", 81559),)


def test_no_gpus_are_listed_if_nvidia_smi_fails(tmp_path, monkeypatch):
    on_path(tmp_path / "bin", "echo NVIDIA-SMI has failed; exit 9", monkeypatch)
    assert devices_for(load("tiny"), {}) == Devices()


def test_error_is_raised_if_nvidia_smi_hangs_and_the_run_uses_gpus(tmp_path, monkeypatch):
    on_path(tmp_path / "bin", "exec sleep 600", monkeypatch)
    monkeypatch.setattr(counting, "_DEADLINE_S", 0.2)
    with pytest.raises(UserError, match=r"nvidia-smi did not answer within 0\.2 s, so which GPUs there are is unknown"):
        devices_for(load("tiny"), {})
    nobody_asks = load("tiny", ["engine.device=cpu", "trainer.device=cpu"])
    assert devices_for(nobody_asks, {}) == Devices(), "a run without GPUs does not call nvidia-smi"


def test_gpus_are_read_from_the_drivers_files_if_nvidia_smi_is_missing(tmp_path, monkeypatch):
    for place, uuid in (("0000:3b:00.0", "GPU-22bb"), ("0000:07:00.0", "GPU-11aa")):
        (tmp_path / "gpus" / place).mkdir(parents=True)
        (tmp_path / "gpus" / place / "information").write_text(f"Model: \t\t NVIDIA A100\nGPU UUID: \t {uuid}\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(counting, "_PROC", tmp_path / "gpus")
    assert devices_for(load("tiny"), {}) == Devices((VisibleDevice("0"), VisibleDevice("1")))
    assert devices_for(load("tiny"), {"CUDA_VISIBLE_DEVICES": "GPU-22bb"}).each == (VisibleDevice("GPU-22bb"),)
    monkeypatch.setattr(counting, "_PROC", tmp_path / "nothing")
    assert devices_for(load("tiny"), {}) == Devices()
