import sys
from argparse import Namespace

import pytest

from kohya_ext.gpu import attention
from kohya_ext.gpu.attention import Shape, cause_of_math, describe, implementation, shapes, use_installed
from kohya_ext.sdscripts.families import BY_NAME

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("family", "args", "expected"),
    [
        ("sdxl", {"sdpa": True}, "sdpa"),
        ("sdxl", {"sdpa": True, "xformers": True}, "xformers"),
        ("sdxl", {"mem_eff_attn": True, "xformers": True}, "mem_eff_attn"),
        ("sd15", {}, "none"),
        ("flux", {"xformers": True}, "sdpa"),
        ("anima", {"attn_mode": None, "xformers": True}, "xformers"),
        ("anima", {"attn_mode": "flash"}, "flash"),
        ("hunyuan-image", {"attn_mode": "torch"}, "sdpa"),
        ("lumina", {"use_flash_attn": True}, "flash"),
        ("lumina", {"use_flash_attn": False}, "sdpa"),
    ],
)
def test_implementation_is_the_one_that_upstream_runs(family, args, expected):
    assert implementation(BY_NAME[family], Namespace(**args)) == expected


@pytest.mark.parametrize(
    ("script", "args", "changed"),
    [
        ("sdxl_train.py", {"xformers": True, "sdpa": False}, {"xformers": False, "sdpa": True}),
        ("sdxl_train.py", {"sdpa": True, "diffusers_xformers": True}, {"diffusers_xformers": False}),
        ("lumina_train.py", {"use_flash_attn": True}, {"use_flash_attn": False}),
        ("anima_train_network.py", {"attn_mode": "flash", "xformers": False}, {"attn_mode": "torch"}),
        ("flux_train.py", {"xformers": True}, {}),
        ("sdxl_train.py", {"sdpa": True, "xformers": False}, {}),
        ("cache_latents.py", {"xformers": True}, {}),
    ],
)
def test_missing_package_is_replaced_by_pytorchs_attention(monkeypatch, script, args, changed):
    for module in ("xformers", "xformers.ops", "flash_attn", "sageattention"):
        monkeypatch.setitem(sys.modules, module, None)
    arguments = Namespace(**args)
    lines = use_installed(script, arguments)
    assert vars(arguments) == args | changed
    assert len(lines) == bool(changed)


@pytest.mark.parametrize(
    ("selected", "mode"), [({}, "torch"), ({"xformers": True}, "xformers"), ({"attn_mode": "flash"}, "flash")]
)
def test_anima_without_an_attention_uses_pytorchs(monkeypatch, selected, mode):
    monkeypatch.setattr(attention, "_import_problem", lambda module: "")
    arguments = Namespace(**{"attn_mode": None, "xformers": False} | selected)
    assert use_installed("anima_train.py", arguments) == []
    assert arguments.attn_mode == mode


def test_masks_of_the_families():
    masked = [name for name, family in BY_NAME.items() if shapes(family, Namespace(train_batch_size=2))[0].masked]
    assert masked == ["lumina", "hunyuan-image"]
    assert shapes(BY_NAME["flux"], Namespace(apply_t5_attn_mask=True)) == [Shape(128, masked=True)]
    for batch in (1, 2):
        args = Namespace(apply_t5_attn_mask=True, train_batch_size=batch)
        assert shapes(BY_NAME["flux"], args, ("flux",)) == [Shape(128, masked=batch > 1)]
    assert shapes(BY_NAME["sd15"], Namespace(v2=True)) == [Shape(64)]


@pytest.mark.parametrize(
    ("is_math", "expected"),
    [
        (lambda shape, dtype: dtype is torch.bfloat16, "bfloat16; use --mixed_precision fp16"),
        (lambda shape, dtype: shape.masked, "the mask"),
        (lambda shape, dtype: shape.head > 128, "the head dimension 160"),
        (lambda shape, dtype: True, "this GPU, or a setting of torch.backends.cuda"),
    ],
)
def test_cause_is_the_property_without_which_another_kernel_runs(monkeypatch, is_math, expected):
    monkeypatch.setattr(attention, "kernel", lambda shape, dtype, device: "math" if is_math(shape, dtype) else "flash")
    assert cause_of_math(Shape(160, masked=True), torch.bfloat16, "cuda") == expected


def test_kernels_are_grouped(monkeypatch):
    monkeypatch.setattr(attention, "kernel", lambda shape, dtype, device: "flash" if shape.head < 100 else "memory-efficient")
    words = "PyTorch's flash (head dimension 40, 80) and memory-efficient (head dimension 160) in float16"
    assert describe([Shape(40), Shape(80), Shape(160)], torch.float16, "cuda") == (words, "")
