"""A run whose sd-scripts cannot load CLIP with the installed transformers ends before a model is loaded."""

from argparse import Namespace

import pytest

from kohya_ext.preflight import Findings, packages


@pytest.mark.parametrize(
    ("script", "transformers", "wrapper", "fails"),
    [
        ("sdxl_train_network.py", "5.17.0", False, True),
        ("flux_train_network.py", "5.6.0", False, True),
        ("sdxl_train_network.py", "5.17.0", True, False),
        ("sdxl_train_network.py", "4.57.6", False, False),
        ("lumina_train_network.py", "5.17.0", False, False),
    ],
)
def test_transformers_is_checked_against_the_loaders(tmp_path, monkeypatch, script, transformers, wrapper, fails):
    (tmp_path / "library").mkdir()
    if wrapper:
        (tmp_path / "library" / "clip_text_model.py").touch()
    monkeypatch.setattr(packages, "version", lambda name: {"transformers": transformers}[name])
    findings = Findings()
    packages.check(tmp_path / script, Namespace(), findings)
    assert len(findings.errors) == fails
    assert all(f"cannot load CLIP with transformers {transformers}" in error for error in findings.errors)
