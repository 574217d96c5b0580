"""The cache of --base_precision: its file is used for exactly the weights that it was made from."""

import errno
import json
import os
import threading
from argparse import Namespace

import pytest

torch = pytest.importorskip("torch")

from safetensors import safe_open  # noqa: E402

from kohya_ext.quantization.linear import convert, install  # noqa: E402
from kohya_ext.run.atomic_write import DiskFullError  # noqa: E402
from kohya_ext.weights import base_cache  # noqa: E402
from kohya_ext.weights.base_cache import BaseCache, UnusableError, content, file_in, origin  # noqa: E402
from kohya_ext.weights.postponed import History, PostponedCast  # noqa: E402

INT8, FP8, CPU = torch.int8, torch.float8_e4m3fn, torch.device("cpu")


@pytest.fixture
def args(tmp_path):
    checkpoint = tmp_path / "model.safetensors"
    checkpoint.write_bytes(b"weights")
    return Namespace(pretrained_model_name_or_path=str(checkpoint), base_weights=None, base_weights_multiplier=None)


def _layers(seed=0, width=64):
    torch.manual_seed(seed)
    return [(f"block.{index}", torch.nn.Linear(width, 33, bias=False).requires_grad_(False)) for index in range(3)]


def _cache(args, layers, kind=INT8):
    precision = "int8" if kind is INT8 else "fp8"
    folder = base_cache.Path(args.pretrained_model_name_or_path).parent / "kept"
    return BaseCache(file_in(folder, args, precision), kind, {**origin(args, kind, CPU), "content": content(layers)})


def _written(args, kind=INT8, **layers):
    """Write a cache as a run does, and return it with the converted layers."""
    converted = _layers(**layers)
    cache = _cache(args, converted, kind)
    for _, layer in converted:
        convert(layer, kind, "operations", "cpu")
    cache.write(converted)
    return cache, converted


@pytest.mark.parametrize("kind", [INT8, FP8])
def test_weights_are_those_of_the_first_run(args, kind):
    _, converted = _written(args, kind)
    layers = _layers()
    cache = _cache(args, layers, kind)
    for (_, layer), (bits, scales), (_, expected) in zip(layers, cache.read(layers), converted, strict=True):
        install(layer, kind, "operations", bits, scales)
        assert torch.equal(layer.weight, expected.weight)
        assert torch.equal(layer.scales, expected.scales)
        x = torch.randn(40, 64)
        assert torch.equal(layer(x), expected(x))


def test_file_is_an_ordinary_safetensors_file(args):
    cache, converted = _written(args, FP8, width=60)
    with safe_open(cache.path, framework="pt") as file:
        assert len(file.keys()) == 2 * len(converted)
        assert file.get_tensor("block.1.weight").dtype is FP8
        assert json.loads(file.metadata()["kohya_ext_base"])["format"][0] == 1


def test_there_is_no_file_before_the_first_run(args):
    layers = _layers()
    assert _cache(args, layers).read(layers) is None


def _later(args):
    os.utime(args.pretrained_model_name_or_path, ns=(1, 1))


def _longer(args):
    stat = os.stat(args.pretrained_model_name_or_path)
    base_cache.Path(args.pretrained_model_name_or_path).write_bytes(b"other weights")
    os.utime(args.pretrained_model_name_or_path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize(
    ("change", "reason"),
    [(_later, "checkpoint"), (_longer, "checkpoint"), ("_VERSION", "format"), ("BLOCK", "format")],
)
def test_a_file_of_something_else_is_refused(args, monkeypatch, change, reason):
    _written(args)
    layers = _layers()
    if callable(change):
        change(args)
    else:
        monkeypatch.setattr(base_cache, change, 2)
    with pytest.raises(UnusableError, match=f"^it was made with another {reason}$"):
        _cache(args, layers).read(layers)


def _of_another_device(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")


def _of_another_torch(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "1.0")


@pytest.mark.parametrize(("change", "reason"), [(_of_another_device, "device"), (_of_another_torch, "software")])
def test_sums_of_other_software_and_devices_are_refused(args, monkeypatch, change, reason):
    _written(args)
    change(monkeypatch)
    layers = _layers()
    with pytest.raises(UnusableError, match=reason):
        _cache(args, layers).read(layers)


def test_layers_with_other_values_are_refused_even_if_the_checkpoint_looks_the_same(args):
    """As after a merge, a cast to another precision, or a copy that keeps a file's time."""
    _written(args)
    others = _layers()
    with torch.no_grad():
        others[2][1].weight[32, 5] += 1
    renamed = [(f"other.{index}", layer) for index, (_, layer) in enumerate(_layers())]
    cast = [(name, layer.bfloat16().float()) for name, layer in _layers()]
    for layers in (others, renamed, cast, _layers()[:2]):
        with pytest.raises(UnusableError, match=r"another content$"):
            _cache(args, layers).read(layers)


def test_content_is_read_without_computing_postponed_casts():
    """And a weight that was changed on the host, as by a merge, has another content."""
    layers = _layers()
    for _, layer in layers:
        layer.weight = torch.nn.Parameter(PostponedCast(History(layer.weight.detach())), requires_grad=False)
    before = content(layers)
    assert not any(layer.weight.history.is_read for _, layer in layers)
    assert content([(name, layer.bfloat16()) for name, layer in layers]) != before
    layers[0][1].weight.data.mul_(2)
    assert content(layers) != before


@pytest.mark.parametrize("size", [0, 7, 300, -1])
def test_a_damaged_file_is_refused(args, size):
    cache, _ = _written(args)
    whole = cache.path.read_bytes()
    cache.path.write_bytes(whole[:size])
    layers = _layers()
    with pytest.raises(UnusableError, match="damaged"):
        cache.read(layers)


def test_a_file_of_another_program_is_refused(args):
    from safetensors.torch import save_file

    layers = _layers()
    cache = _cache(args, layers)
    cache.path.parent.mkdir()
    save_file({name: layer.weight for name, layer in layers}, cache.path)
    with pytest.raises(UnusableError, match="damaged"):
        cache.read(layers)


def test_each_checkpoint_precision_and_merge_has_a_file_of_its_own(args, tmp_path):
    other = Namespace(**vars(args) | {"pretrained_model_name_or_path": str(tmp_path / "other" / "model.safetensors")})
    merged = Namespace(**vars(args) | {"base_weights": ["a.safetensors"]})
    halved = Namespace(**vars(merged) | {"base_weights_multiplier": [0.5]})
    files = [file_in(tmp_path, each, "int8") for each in (args, other, merged, halved)]
    assert len({*files, file_in(tmp_path, args, "fp8")}) == 5


def test_a_full_disk_leaves_the_earlier_file(args, monkeypatch):
    cache, converted = _written(args)
    before = cache.path.read_bytes()

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFullError):
        cache.write(converted)
    assert [file.name for file in cache.path.parent.iterdir()] == [cache.path.name]
    assert cache.path.read_bytes() == before


def test_two_runs_at_once_leave_one_complete_file(args):
    cache, converted = _written(args)
    before = cache.path.read_bytes()
    writers = [threading.Thread(target=cache.write, args=(converted,)) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [file.name for file in cache.path.parent.iterdir()] == [cache.path.name]
    assert cache.path.read_bytes() == before


def test_what_a_killed_run_left_is_removed(args):
    cache, converted = _written(args)
    from kohya_ext.run import atomic_write

    left = cache.path.with_name(f"{cache.path.name}.{atomic_write._host()}-999999999-0.partial")
    left.touch()
    cache.write(converted)
    assert not left.exists()
