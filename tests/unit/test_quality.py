"""Checks of the whole repository: linters, links, generated files and packages."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tomlkit

from kohya_ext.config import preset_files, settings
from tools import generate

ROOT = Path(__file__).parent.parent.parent
#: Options of sd-scripts, and of a benchmark, that the documentation names and this package's code does not.
OTHERS = {f"--{name}" for name in (
    "compiled", "min_snr_gamma", "no-cache_latents", "no-cache_text_encoder_outputs", "no-gradient_checkpointing",
    "optimizer_args", "resume", "sample_prompts", "shuffle_caption", "split_attn", "text_encoder_lr", "torch_compile",
    "vae_batch_size", "lr_scheduler", "log_with", "fp8_base", "fp8_base_unet", "fp8_scaled", "base_weights",
    "fused_backward_pass", "fused_optimizer_groups", "blockwise_fused_optimizers", "ddp_timeout", "train_batch_size",
    "max_train_steps", "gradient_accumulation_steps", "persistent_data_loader_workers",
    "attn_mode", "full_bf16", "gate", "lowram", "scale_weight_norms", "token_warmup_step", "train_inpainting", "initial_step",
    "initial_epoch", "skip_until_initial_step", "validate_every_n_steps", "pretrained_model_name_or_path",
    "deepspeed", "zero_stage", "save_state", "offload_optimizer_device", "offload_param_device", "max_grad_norm",
    "ddp_gradient_as_bucket_view", "command", "dim_from_weights", "lr_scheduler_type",
    "ae", "caption_dropout_rate", "huggingface_repo_id", "huggingface_token", "log_tracker_config", "wandb_api_key",
    "network_args", "weighted_captions", "save_last_n_steps",
    "nodes", "ntasks-per-node", "gres", "cpus-per-task", "time", "signal",  # SLURM's
    "nnodes", "nproc_per_node", "max-restarts", "rdzv_backend", "rdzv_id", "rdzv_endpoint",  # torchrun's
)}  # fmt: skip

PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("command", [("ruff", "check"), ("ruff", "format", "--check"), ("mypy",)], ids=" ".join)
def test_linters_and_type_checker_pass(command):
    pytest.importorskip(command[0])
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_imports_between_rooms_point_downwards():
    pytest.importorskip("importlinter")
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as lint; lint()"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.linux("its tables have predictions for Linux")
def test_generated_files_are_current():
    for file, text in generate.generated().items():
        assert file.read_text(encoding="utf-8") == text, f"{file.name} is not current; run: python tools/generate.py"


def test_links_in_the_documentation_are_valid():
    for page in (*PAGES, ROOT / "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path, _, heading = target.partition("#")
            if path.startswith("https:"):
                continue
            file = (page.parent / path) if path else page
            assert file.exists(), f"{page.name} links to {target}"
            assert not heading or heading in _headings(file), f"{page.name} links to {target}"


def _headings(file):
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_documentation_contains_only_existing_options():
    known = {flag for name, _ in settings.options() for flag in (*settings.flags(name), *settings.negated_flags(name))}
    for family, name, _ in preset_files.shipped():
        known |= {f"--{key}" for key in preset_files.load([f"{family}/{name}"], preset_files.scripts(family)[0]).values}
    parsers = [*(ROOT / "kohya_ext").rglob("*.py"), *(ROOT / "patches").glob("*.py")]
    sources = "\n".join(file.read_text(encoding="utf-8") for file in parsers)
    for page in PAGES:
        for flag in set(re.findall(r"--[a-z][\w-]+", page.read_text(encoding="utf-8"))) - known - OTHERS:
            assert f'"{flag}"' in sources, f"{page.name} names {flag}"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_example_patch_in_the_developer_documentation_passes_its_test(tmp_path):
    page = (ROOT / "docs" / "developers.md").read_text(encoding="utf-8")
    files = dict(re.findall(r"^`([\w/]+\.py)`:\n\n```python\n(.*?)```$", page, re.MULTILINE | re.DOTALL))
    assert len(files) == 3
    for name, code in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(code, encoding="utf-8")
    (tmp_path / "conftest.py").write_text(f"import kohya_ext.patches as p\np.__path__.append({str(tmp_path / 'patches')!r})\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_ci_runs_the_readmes_test_command():
    command = next(
        line.strip() for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if "-m pytest" in line
    )
    assert command in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


def test_the_base_install_changes_no_package_of_a_kohya_environment():
    dependencies = tomlkit.parse((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    names = {dependency.split(">")[0] for dependency in dependencies}
    assert names == {"packaging", "platformdirs", "rich", "toml", "tomlkit", "wrapt"}
    assert all("<" not in dependency and "==" not in dependency for dependency in dependencies)


def test_the_wheel_contains_patches_presets_and_the_startup_file(tmp_path):
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("patches", "presets"):
        there = {
            file.relative_to(ROOT / folder).as_posix() for file in (ROOT / folder).rglob("*.*") if "pycache" not in str(file)
        }
        assert {f"kohya_ext/{folder}/{name}" for name in there} <= names
    assert "kohya_ext.pth" in names
    assert {f"kohya_ext/reporting/{name}" for name in ("page.html", "page.css", "page.js", "uplot/LICENSE")} <= names
    assert not any(name.startswith(("tests/", "patches/", "presets/")) for name in names)
