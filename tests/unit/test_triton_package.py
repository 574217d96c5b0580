"""Without Triton, as on Windows, one line names the effect and the command."""

import os
import sys
from importlib.metadata import PackageNotFoundError

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.patches import speed  # noqa: E402

from kohya_ext.config.command_line import quoted  # noqa: E402
from kohya_ext.kernels import fused, triton_package  # noqa: E402
from kohya_ext.quantization.support import find_products  # noqa: E402

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _without_triton(monkeypatch):
    monkeypatch.setattr("torch.utils._triton.has_triton_package", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    triton_package._warn.cache_clear()
    fused.elementwise_kernels.cache_clear()
    yield
    fused.elementwise_kernels.cache_clear()


@pytest.mark.parametrize(
    ("torch_version", "required", "release"),
    [
        ("2.14.1", ['triton~=3.8.0; platform_system == "Linux"'], "==3.8.*"),
        ("2.6.0", ['triton (==3.2.0) ; platform_system == "Linux"'], "==3.2.*"),
        ("2.8.0+cu128", ["filelock"], "==3.4.*"),  # a build for Windows, from PyTorch's own index
        ("2.99.0", None, ""),
    ],
)
def test_the_release_for_torch_is_installed_into_this_environment(monkeypatch, torch_version, required, release):
    monkeypatch.setattr(triton_package, "version", lambda package: torch_version)
    monkeypatch.setattr(triton_package, "requires", lambda package: required)
    package = "triton-windows" if os.name == "nt" else "triton"
    command = quoted([sys.executable, "-m", "pip", "install", f"{package}{release}"])
    assert triton_package.missing_triton() == f"Triton is not installed; run: {command}"


@pytest.mark.parametrize(
    ("torch_version", "packages", "words"),
    [
        (
            "2.7.1+cu128",
            {"triton-windows": "3.6.0.post25"},
            "Triton 3.6.0.post25 is installed, and torch 2.7 works with 3.3; run: ",
        ),
        ("2.14.1", {"triton": "3.7.0"}, "Triton 3.7.0 is installed, and torch 2.14 works with 3.8; run: "),
        ("2.7.1+cu128", {"triton-windows": "3.3.1.post19"}, None),
        ("2.4.1+cu121", {"triton": "3.0.0"}, None),
        ("2.14.1", {}, None),
        ("2.99.0", {"triton": "3.0.0"}, None),
    ],
)
def test_another_release_than_torch_works_with_is_a_line(monkeypatch, torch_version, packages, words):
    def version(package):
        if package not in {"torch", *packages}:
            raise PackageNotFoundError(package)
        return {"torch": torch_version, **packages}[package]

    monkeypatch.setattr(triton_package, "version", version)
    monkeypatch.setattr(triton_package, "requires", lambda package: None)
    package = "triton-windows" if os.name == "nt" else "triton"
    release = {"2.7.1+cu128": "3.3", "2.14.1": "3.8"}.get(torch_version)
    command = quoted([sys.executable, "-m", "pip", "install", f"{package}=={release}.*"])
    assert triton_package.mismatched_triton() == (words and words + command)


def test_each_release_of_torch_that_is_supported_has_one_of_triton():
    minors = range(4, 16)
    assert list(triton_package._RELEASES) == [f"2.{minor}" for minor in minors]


def test_all_that_needs_it_is_one_line(capsys):
    assert speed._reason_not_to_compile(speed.Namespace(), GPU, speed.Settings()) == triton_package.missing_triton()
    assert fused.elementwise_kernels("cuda", torch.float16) is None
    assert fused.elementwise_kernels("cuda", torch.bfloat16) is None
    assert capsys.readouterr().err.count("Triton is not installed; run:") == 1


@pytest.mark.parametrize(
    ("capability", "release", "warned"), [((7, 5), "3.3", False), ((7, 5), "3.2", True), ((8, 0), "3.3", True)]
)
def test_a_gpu_that_it_does_not_support_needs_none(monkeypatch, capsys, capability, release, warned):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(triton_package, "_release", lambda: release)
    assert triton_package.is_missing(GPU)
    assert ("Triton is not installed" in capsys.readouterr().err) is warned


def test_an_8_bit_base_says_what_to_install():
    assert find_products(GPU, torch.int8) == ("weights", triton_package.missing_triton())
