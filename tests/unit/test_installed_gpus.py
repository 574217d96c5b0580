"""The GPU that CUDA uses first, from a stand-in for nvidia-smi."""

import os
import shutil
import subprocess

import pytest

from kohya_ext import installed_gpus
from kohya_ext.installed_gpus import InstalledGpu
from kohya_ext.units import GIB

pytestmark = pytest.mark.linux("the stand-in is a shell script")

SLOW = InstalledGpu("NVIDIA GeForce GTX 1050", 4 * GIB, 6.1, "GPU-11111111-aaaa-bbbb-cccc-000000000000")
FAST = InstalledGpu("NVIDIA GeForce RTX 3060", 12 * GIB, 8.6, "GPU-22222222-aaaa-bbbb-cccc-000000000000")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return a function that installs GPUs, in nvidia-smi's order, with CUDA's first one."""

    def install(*gpus, cuda=None, fields=4):
        rows = "\\n".join(f"{gpu.uuid}, {gpu.name}, {gpu.memory // 2**20}, {gpu.capability}" for gpu in gpus)
        old = "case $1 in *compute_cap*) exit 2;; esac; " if fields == 3 else ""
        cut = " | cut -d, -f1-3" if fields == 3 else ""
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{old}printf '{rows}\\n'{cut}\n")
        tool.chmod(0o755)
        monkeypatch.setattr(installed_gpus, "_asked_of_cuda", lambda: cuda)
        installed_gpus._first_gpu.cache_clear()

    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    return install


@pytest.mark.parametrize("visible", [None, "0", "0,1"])
def test_of_two_cards_it_is_the_one_that_cuda_uses(machine, monkeypatch, visible):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    machine(SLOW, FAST, cuda=FAST._replace(memory=FAST.memory - 2**28))
    assert installed_gpus.first_gpu() == FAST
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert installed_gpus.first_gpu() == SLOW


@pytest.mark.parametrize("visible", [FAST.uuid, "GPU-2222", "gpu-22222222", "1"])
def test_a_card_is_found_by_its_uuid_or_the_start_of_it(machine, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    machine(SLOW, FAST)
    assert installed_gpus.first_gpu() == FAST


def test_a_mig_device_has_its_own_size(machine, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-33333333-aaaa-bbbb-cccc-000000000000")
    part = InstalledGpu("NVIDIA A100 MIG 1g.10gb", 10 * GIB, 8.0, "GPU-44444444-aaaa-bbbb-cccc-000000000000")
    machine(part._replace(name="NVIDIA A100", memory=80 * GIB), cuda=part)
    assert installed_gpus.first_gpu() == part


def test_an_old_driver_does_not_tell_the_capability(machine):
    machine(FAST, fields=3)
    assert installed_gpus.first_gpu() == FAST._replace(capability=None)


@pytest.mark.parametrize("visible", ["", "-1", "7"])
def test_no_card_is_visible(machine, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    machine(FAST, FAST)
    assert installed_gpus.first_gpu() is None


def test_cuda_is_asked_in_another_process(tmp_path, monkeypatch):
    """A library that answers as the driver does."""
    source = tmp_path / "cuda.c"
    source.write_text(
        """
        #include <string.h>
        int cuInit(unsigned flags) { return 0; }
        int cuDeviceGet(int *device, int ordinal) { *device = 7; return 0; }
        int cuDeviceGetName(char *name, int size, int device) { strcpy(name, "NVIDIA GeForce RTX 3060"); return device != 7; }
        int cuDeviceTotalMem_v2(unsigned long *size, int device) { *size = 12UL << 30; return 0; }
        int cuDeviceGetUuid(unsigned char *uuid, int device) { for (int i = 0; i < 16; i++) uuid[i] = i; return 0; }
        int cuDeviceGetAttribute(int *value, int which, int device) { *value = which == 75 ? 8 : 6; return 0; }
        """
    )
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", source], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    uuid = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert installed_gpus._asked_of_cuda() == InstalledGpu("NVIDIA GeForce RTX 3060", 12 * GIB, 8.6, uuid)


def test_without_a_driver_cuda_answers_nothing(tmp_path, monkeypatch):
    (tmp_path / "libcuda.so.1").write_bytes(b"")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert installed_gpus._asked_of_cuda() is None
