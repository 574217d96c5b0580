"""--cached_caption_variants: steps take shuffled and dropped captions whose text encoder outputs are cached."""

import contextlib
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import time
from argparse import Namespace
from collections import Counter
from functools import partial
from multiprocessing import Value
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kohya_ext.patches import cached_caption_variants  # noqa: E402

from kohya_ext.caching import caption_variants  # noqa: E402
from kohya_ext.caching.caption_variants import MARK, ProcessedCaption  # noqa: E402
from kohya_ext.config.settings import Settings  # noqa: E402
from kohya_ext.patching.attributes import replaced  # noqa: E402
from kohya_ext.patching.patch import Patcher, registry  # noqa: E402
from kohya_ext.tiny import arguments, dataset  # noqa: E402
from tests.real import caching, starting  # noqa: E402

TAGS = ("sks style", "red circle", "blue background", "flat colours", "large")
SHUFFLED = {"shuffle_caption": True, "keep_tokens": 1}
OPTION = "--cached_caption_variants"
ACCELERATOR = SimpleNamespace(**vars(caching.ACCELERATOR), wait_for_everyone=lambda: None)
CACHED = ("--cache_text_encoder_outputs", "--network_train_unet_only")
ON_DISK = (*CACHED, "--cache_text_encoder_outputs_to_disk")

#: What the scripts' parsers set for each subset.
DEFAULTS = {"caption_separator": ",", "keep_tokens_separator": ""}
TEXT = {"caption_extension": ".txt"}
BUCKETS = {"resolution": 64, "enable_bucket": True, "min_bucket_reso": 16, "max_bucket_reso": 128, "bucket_reso_steps": 16}


def caption_of(index):
    return ", ".join((*TAGS, f"number {index}"))


@pytest.fixture
def data(tmp_path):
    """A folder of images in two buckets, with captions of six tags."""
    dataset.write(tmp_path / "data", 4, 128)
    folder = tmp_path / "data" / dataset.CLASS
    for index, file in enumerate(sorted(folder.glob("*.txt"))):
        file.write_text(caption_of(index), encoding="utf-8")
    return folder


class Library:
    """A checkout's datasets and SDXL's strategy, with an encoder whose outputs show the text."""

    def __init__(self, module, checkout):
        self.config = module("library.config_util")
        self.base = module("library.strategy_base")
        names = ("cached_caption_variants", "parallel_caching", "atomic_saves")
        self.patcher = partial(Patcher, {name: registry()[name] for name in names}, checkout=checkout)
        self.kind = module("library.strategy_sdxl").SdxlTextEncoderOutputsCachingStrategy
        self.latents = module("library.strategy_sd").SdSdxlLatentsCachingStrategy(False, True, 1, False)
        self.encoded = []

    def group(self, *subsets, **dataset_options):
        """Return a group of one dataset, made as the scripts make it."""
        rows = [DEFAULTS | ({} if "metadata_file" in subset else TEXT) | subset for subset in subsets]
        row = {**BUCKETS, "batch_size": 2, **dataset_options, "subsets": rows}
        sanitizer = self.config.ConfigSanitizer(True, True, False, True)
        blueprint = self.config.BlueprintGenerator(sanitizer).generate({"datasets": [row]}, SimpleNamespace())
        random.seed(0)
        # v0.10 looks for cached latents of images in metadata files.
        with replaced(self.base.LatentsCachingStrategy, "_strategy", self.latents):
            groups = self.config.generate_dataset_group_by_blueprint(blueprint.dataset_group)
        return groups if isinstance(groups, tuple) else (groups, None)

    @contextlib.contextmanager
    def run(self, count, seed=0, to_disk=False, delay=0):
        """Patch the library as in a run with this many variants; yield a function that caches a group."""
        patcher = self.patcher(Settings(cached_caption_variants=count))
        run = cached_caption_variants._Run(SimpleNamespace())
        run.seed, self.encoded = seed, []
        strategy = self.kind(to_disk, 2, False)
        strategy.cache_batch_outputs = partial(self._encode, strategy, delay)
        patcher.arm()
        try:
            with (
                replaced(self.base.TextEncoderOutputsCachingStrategy, "_strategy", strategy),
                replaced(self.base.TokenizeStrategy, "_strategy", SimpleNamespace(tokenize=tokenized)),
            ):
                yield partial(self._cache, run)
        finally:
            patcher.undo()

    def _encode(self, strategy, delay, tokenize, models, encode, infos):
        for info in infos:
            time.sleep(delay)
            self.encoded.append(info.caption)
            arrays = {"hidden_state1": characters(info.caption), "hidden_state2": np.ones(5, np.float32), "pool2": np.ones(2)}
            if strategy.cache_to_disk:
                np.savez(info.text_encoder_outputs_npz, **arrays)
            else:
                info.text_encoder_outputs = list(arrays.values())

    def _cache(self, run, group):
        assert group.is_text_encoder_output_cacheable()  # LoRA scripts ask before the run begins
        group.set_current_strategies()
        with replaced(cached_caption_variants, "current", lambda kind: run):
            group.new_cache_text_encoder_outputs([], ACCELERATOR)
        return run


def tokenized(caption):
    return [torch.from_numpy(characters(caption))[None]]


def characters(text):
    return np.array([*map(ord, text.ljust(120))], np.float32)


def texts_of(batch):
    """Return the texts whose outputs are in a batch."""
    return ["".join(map(chr, map(int, row))).rstrip() for row in batch["text_encoder_outputs_list"][0]]


def epochs(run, group, count, workers=0):
    """Return the texts of each batch of some epochs, loaded as by the scripts."""
    epoch, step = Value("i", 0), Value("i", 0)
    collate = sys.modules[type(group).__module__].collator_class(epoch, step, group if workers == 0 else None)
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(group, batch_size=1, shuffle=True, collate_fn=collate, num_workers=workers)
    texts = []
    for number in range(count):
        epoch.value = number + 1
        texts.append([texts_of(batch) for batch in run.batches(loader, loader.__iter__, None)])
    return texts


@pytest.fixture
def library(checkout, checkout_module):
    checkout_module("library.train_util")
    return Library(checkout_module, checkout)


def flat(nested):
    return [text for batches in nested for batch in batches for text in batch]


def test_steps_take_variants_that_upstreams_processing_makes(library, data):
    group, _ = library.group(
        {"image_dir": str(data), "num_repeats": 3, **SHUFFLED, "caption_prefix": "photo of", "caption_tag_dropout_rate": 0.3}
    )
    assert not group.is_text_encoder_output_cacheable()
    with library.run(4) as cache:
        random.seed(7)
        before = random.getstate()
        run = cache(group)
        assert random.getstate() == before
        taken = Counter(flat(epochs(run, group, 4)))
        group[0]
        state = random.getstate()
        group[0]
        assert random.getstate() == state
    assert sum(taken.values()) == 4 * 3 * 4
    assert taken.keys() <= set(library.encoded)
    assert len(set(library.encoded)) == len(library.encoded) - 1 <= 16  # the first one twice, to measure its size
    assert len(taken) > 12
    for text in taken:
        fixed, *others = text.split(", ")
        assert fixed == f"photo of {TAGS[0]}"
        assert set(others) <= {*TAGS[1:], *(f"number {index}" for index in range(4))}
    orders = [text for text in taken if len(text) == max(map(len, taken))]
    assert any(text.split(", ")[1:] != [*TAGS[1:], text[-8:]] for text in orders)


def test_variants_do_not_depend_on_workers(library, data):
    """With one image the order of the data, which depends on workers, is the same."""
    for file in sorted(data.glob("*"))[2:]:
        file.unlink()
    texts = {}
    for workers in (0, 2):
        group, _ = library.group(
            {"image_dir": str(data), "num_repeats": 6, **SHUFFLED, "caption_dropout_rate": 0.3}, batch_size=1
        )
        with library.run(5) as cache:
            texts[workers] = epochs(cache(group), group, 3, workers)
    assert texts[0] == texts[2]
    assert len({tuple(map(tuple, epoch)) for epoch in texts[0]}) == 3
    assert "" in flat(texts[0])


def test_an_image_that_is_in_a_batch_twice_has_two_variants(library, data):
    for file in sorted(data.glob("*"))[2:]:
        file.unlink()
    group, _ = library.group({"image_dir": str(data), "num_repeats": 8, **SHUFFLED}, batch_size=8)
    with library.run(8) as cache:
        run = cache(group)
        ((texts,),) = epochs(run, group, 1)
    assert len(set(texts)) > 3


def test_a_second_start_encodes_new_texts_alone(library, data, capsys):
    def start(count=3, seed=0, **options):
        group, _ = library.group({"image_dir": str(data), **SHUFFLED, **options})
        with library.run(count, seed, to_disk=True) as cache:
            run = cache(group)
            run.before_batch(ACCELERATOR)
            return set(flat(epochs(run, group, 3))), set(library.encoded)

    first, encoded = start()
    assert len(encoded) == 12
    assert first <= encoded
    assert len(list(data.glob(f"*{MARK}*_te_outputs.npz"))) == 12
    assert start() == (first, set())

    (data / "000.txt").write_text("sks style, a green square, small, dark, round", encoding="utf-8")
    second, encoded = start()
    assert len(encoded) == 3
    assert all("green square" in text for text in encoded)
    assert not any(text.endswith("number 0") or "number 0," in text for text in second)
    assert "3 cached texts of other captions, options or seeds" in capsys.readouterr().err

    _, encoded = start(caption_suffix="at night")
    assert len(encoded) == 12
    _, encoded = start(seed=1)
    assert len(encoded) == 12
    assert start() == (second, set())


def test_a_subset_without_such_options_is_cached_as_before(library, data, tmp_path):
    plain = tmp_path / "plain"
    shutil.copytree(data, plain)
    group, _ = library.group({"image_dir": str(data), **SHUFFLED}, {"image_dir": str(plain)})
    with library.run(2, to_disk=True) as cache:
        run = cache(group)
        texts = set(flat(epochs(run, group, 2)))
    assert {caption_of(index) for index in range(4)} <= texts
    assert sorted(file.name for file in plain.glob("*.npz")) == [f"{index:03}_te_outputs.npz" for index in range(4)]
    assert not [file for file in data.glob("*.npz") if MARK not in file.name]


def test_class_tokens_are_encoded_once_for_all_images(library, data):
    for file in data.glob("*.txt"):
        file.unlink()
    group, _ = library.group(
        {"image_dir": str(data), "class_tokens": "{cat|dog|bird} in a {red|blue} box", "enable_wildcard": True}
    )
    with library.run(6) as cache:
        texts = flat(epochs(cache(group), group, 3))
    assert set(texts) <= set(library.encoded)
    assert 1 < len(set(texts)) <= len(library.encoded) <= 6


def test_captions_of_a_metadata_file_vary(library, data):
    metadata = data.parent / dataset.METADATA
    group, _ = library.group({"image_dir": str(data), "metadata_file": str(metadata), "shuffle_caption": True})
    with library.run(6) as cache:
        texts = set(flat(epochs(cache(group), group, 4)))
    assert texts <= set(library.encoded)
    assert len(texts) > 4


def test_validation_images_keep_their_first_variant(library, data):
    group, validation = library.group(
        {"image_dir": str(data), **SHUFFLED, "caption_dropout_rate": 0.5}, validation_split=0.5, validation_seed=0
    )
    with library.run(6) as cache:
        run = cache(group)
        assert cache(validation) is run
        assert len(set(flat(epochs(run, validation, 5)))) == 2
        assert len(set(flat(epochs(run, group, 5)))) > 3


def test_captions_are_dropped_in_every_second_epoch(library, data):
    group, _ = library.group({"image_dir": str(data), "caption_dropout_every_n_epochs": 2})
    with library.run(3) as cache:
        texts = epochs(cache(group), group, 4)
    assert [set(flat([epoch])) == {""} for epoch in texts] == [False, True, False, True]


def test_clip_gets_the_text_whose_t5_outputs_are_cached(library, data):
    group, _ = library.group({"image_dir": str(data), **SHUFFLED, "caption_prefix": "photo of"})
    with library.run(3) as cache:
        cache(group)
        strategy = library.base.TextEncoderOutputsCachingStrategy._strategy
        strategy._is_partial = True
        for batch in (group[index] for index in range(len(group))):
            tokens = ["".join(map(chr, map(int, row))).rstrip() for row in batch["input_ids_list"][0]]
            assert tokens == texts_of(batch) == batch["captions"]
            assert not any(isinstance(caption, ProcessedCaption) for caption in batch["captions"])


def test_warm_up_of_tokens_stays_refused(library, data):
    group, _ = library.group({"image_dir": str(data), **SHUFFLED, "token_warmup_step": 100})
    with library.run(3):
        assert not group.is_text_encoder_output_cacheable()


@pytest.mark.parametrize("to_disk", [False, True])
def test_variants_that_fit_nowhere_stop_the_run_before_they_are_encoded(library, data, monkeypatch, capsys, to_disk):
    psutil = pytest.importorskip("psutil")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10_000))
    group, _ = library.group({"image_dir": str(data), **SHUFFLED})
    with library.run(4, to_disk=to_disk) as cache, pytest.raises(SystemExit):
        cache(group)
    assert len(library.encoded) == 1  # whose size was measured
    assert not list(data.glob("*.npz"))
    printed = capsys.readouterr().err
    assert re.search(r"1\d texts for 4 images take", printed)
    where = f"in {data}, which has 0.0 MB free" if to_disk else "of host memory, of which 0.0 MB is available"
    assert where in printed


@pytest.mark.skipif(not starting.FORKS, reason="needs SIGKILL")
def test_a_kill_while_variants_are_cached_loses_no_file(library, data):
    def cache(delay):
        group, _ = library.group({"image_dir": str(data), **SHUFFLED})
        with library.run(6, to_disk=True, delay=delay) as cache:
            return set(flat(epochs(cache(group), group, 3)))

    process = multiprocessing.get_context("fork").Process(target=cache, args=(0.1,))
    process.start()
    while process.is_alive() and len(list(data.glob(f"*{MARK}*.npz"))) < 5:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    files = {file.name: file.read_bytes() for file in data.glob(f"*{MARK}*.npz")}
    assert 5 <= len(files) < 20

    texts = cache(0)
    assert texts
    now = {file.name: file.read_bytes() for file in data.glob(f"*{MARK}*.npz")}
    assert files.items() < now.items()
    assert len(set(library.encoded)) == len(now) - len(files)
    assert not list(data.glob("*.partial"))


# --- the scripts -----------------------------------------------------------------------------------------------------


def shuffle_files(library, data, seed):
    """Write to the caption files the texts that one variant of each has."""
    group, _ = library.group({"image_dir": str(data), **SHUFFLED})
    for info in group.datasets[0].image_data.values():
        (text,) = caption_variants.variants_of(group.datasets[0], info, 1, seed).texts
        assert text != info.caption
        Path(info.absolute_path).with_suffix(".txt").write_text(text, encoding="utf-8")


#: Scripts that can cache text encoder outputs -> their families.
SCRIPTS = [
    (script, family)
    for script, families in arguments.SCRIPTS.items()
    for family in families
    if family != "sd15" and not re.search("leco|textual|_old", script)
]
FIRST = ("sdxl_train_network.py", "sdxl")


@pytest.mark.parametrize(
    ("script", "family"),
    [pytest.param(*each, marks=pytest.mark.thorough if each == FIRST else pytest.mark.slow) for each in SCRIPTS],
)
def test_one_shuffled_variant_trains_like_upstream_on_that_caption(checkout, train, library, data, script, family):
    where = ("--train_data_dir", str(data if "control_net" in script else data.parent))
    if "control_net" in script:
        where += ("--conditioning_data_dir", str(data))
    cached = (*(ON_DISK if "network" in script or family == "hunyuan-image" else ON_DISK[::2]), *where)
    shuffle = ("--shuffle_caption", "--keep_tokens", "1", OPTION, "1")
    if script == "sdxl_train.py":
        cached += ("--no-train_text_encoder",)
    ours = train(checkout, script, *cached, *shuffle, family=family)
    assert ours.code == 0, ours.output[-4000:]
    assert f"{OPTION} 1: 4 texts for 4 images take" in ours.output
    assert len([file for file in data.glob("*.npz") if MARK in file.name and "_te" in file.name]) == 4
    shuffle_files(library, data, 1)
    again = train(checkout, script, *cached, family=family)
    assert all(torch.equal(tensor, again.tensors[name]) for name, tensor in ours.tensors.items())


@pytest.mark.thorough
@pytest.mark.parametrize("workers", ["0", "2"])
def test_the_option_changes_nothing_where_nothing_varies(checkout, train, data, workers):
    usual = (*CACHED, "--train_data_dir", str(data.parent), "--max_data_loader_n_workers", workers)
    without = train(checkout, FIRST[0], *usual)
    ours = train(checkout, FIRST[0], *usual, OPTION, "4")
    assert all(torch.equal(tensor, without.tensors[name]) for name, tensor in ours.tensors.items())
    varied = train(checkout, FIRST[0], *usual, OPTION, "4", "--shuffle_caption")
    assert varied.code == 0, varied.output[-4000:]
    assert not all(torch.equal(tensor, without.tensors[name]) for name, tensor in varied.tensors.items())


@pytest.mark.thorough
def test_the_number_of_workers_does_not_change_the_file(checkout, train, data):
    for file in sorted(data.glob("*"))[2:]:
        file.unlink()
    data.rename(data.parent / "3_sks")
    options = (*CACHED, "--train_data_dir", str(data.parent), "--shuffle_caption", "--caption_dropout_rate", "0.3", OPTION, "5")
    options += ("--max_train_steps", "7")
    first, second = (train(checkout, FIRST[0], *options, "--max_data_loader_n_workers", workers) for workers in ("0", "2"))
    assert all(torch.equal(tensor, second.tensors[name]) for name, tensor in first.tensors.items())


@pytest.mark.thorough
@pytest.mark.parametrize("script", [FIRST[0], "flux_train_network.py"])
def test_two_processes_take_the_variants(checkout, train, library, data, script):
    """Each process caches a part of the texts. With one variant the texts are known."""
    where = (*ON_DISK, "--train_data_dir", str(data.parent), "--max_train_steps", "2")
    shuffle = ("--shuffle_caption", "--keep_tokens", "1", OPTION)
    several = train(checkout, script, *where, *shuffle, "3", ranks=2)
    again = train(checkout, script, *where, *shuffle, "3", ranks=2)
    assert "all cached before" in again.output
    assert all(torch.equal(tensor, again.tensors[name]) for name, tensor in several.tensors.items())
    ours = train(checkout, script, *where, *shuffle, "1", ranks=2)
    assert not all(torch.equal(tensor, ours.tensors[name]) for name, tensor in several.tensors.items())
    shuffle_files(library, data, 1)
    upstream = train(checkout, script, *where, ranks=2)
    assert all(torch.equal(tensor, upstream.tensors[name]) for name, tensor in ours.tensors.items())


def test_only_files_that_no_group_reads_are_called_deletable(tmp_path, capsys):
    training, validation, other = (tmp_path / f"a{MARK}{digit * 16}_te_outputs.npz" for digit in "123")
    for file in (training, validation, other):
        file.touch()
    run = cached_caption_variants._Run(Namespace())
    run.files.add(str(training))
    run.files.add(str(validation))
    run.before_batch(ACCELERATOR)
    run.before_batch(ACCELERATOR)
    printed = capsys.readouterr().err
    assert printed.count("can be deleted") == 1
    assert f"1 cached texts of other captions, options or seeds (0.0 MB) can be deleted: {other}" in printed
