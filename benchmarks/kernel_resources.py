"""Compile the Triton kernels for several GPUs, and count registers, spills and shared memory.

    python -m benchmarks.kernel_resources [--capability 86]

Needs no GPU: Triton and the ptxas that it brings compile for any. Every combination of format, precision, tile and row length
that ``kohya_ext/quantization/kernels.py`` chooses is compiled, and so are the kernels of gates, rotary embeddings and
optimizers. sm_75 has the latter alone. A kernel that needs more shared memory than a GPU gives to one block ends a run at its
first step, and spilled registers make it slow.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import results
from kohya_ext.quantization.arithmetic import LARGEST, ROTATED, TINY
from kohya_ext.quantization.rotation import BLOCK

OUTPUT = results.FOLDER / "kernel_resources.json"

#: Compute capability -> bytes of shared memory that one block can have.
#: Source: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#features-and-technical-specifications
SHARED = {75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}

#: Row lengths, one for each number of blocks that a program can have; FLUX's longest row has 15360 elements.
WIDTHS = (1024, 2048, 4096, 8192, 15360)

#: Channels of images, one number for each part of them that a program can read; SDXL's have 320 to 2560.
CHANNELS = (320, 640, 2560)

#: Triton's names of 8-bit formats and precisions in kernels' signatures.
KINDS = {"int8": "i8", "fp8": "fp8e4nv"}
PRECISIONS = ("bf16", "fp16")  # fp32 does not use the kernels

_NAMES = {False: "input", True: "gradient"}

#: Whether the inner size is a multiple of the tile, whether there is a LoRA, and the sizes that are not multiples of 16.
_SHAPES = (
    *((True, False, ()), (True, False, ("m",)), (False, False, ("m",))),
    (False, True, ("m", "hidden", "rank", "hidden_stride", "up_stride_rank", "up_stride_n")),
)

_TYPES = dict.fromkeys(("factors", "scales", "scales_a", "scales_b", "scales_x", "scales_w"), "*fp32")


@dataclass(frozen=True)
class Configuration:
    """One way in which the product launches a kernel."""

    name: str
    kernel: Any
    types: Mapping[str, str]
    """Pointers' names -> their types."""
    constants: Mapping[str, Any]
    warps: int
    stages: int
    unaligned: tuple[str, ...] = ()
    """The sizes that are not multiples of 16; layers' widths are multiples of 64."""


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel needs."""

    registers: int
    """Of each thread."""
    stack: int
    """Bytes of each thread that are in memory: spilled registers and local arrays."""
    shared: int
    """Bytes of each block."""


def kinds(capability: int) -> list[str]:
    """Return the 8-bit formats for which the kernels run on a GPU."""
    from kohya_ext.quantization.linear import KINDS as BY_NAME
    from kohya_ext.quantization.support import OLDEST

    return [name for name, kind in BY_NAME.items() if divmod(capability, 10) >= OLDEST[kind]]


def launches(capability: int, precisions: Sequence[str] = PRECISIONS) -> Iterator[tuple[str, Configuration]]:
    """Yield all launches on a GPU, by their names: the 8-bit format if there is one, the precision, and the kernel's."""
    for precision in precisions:
        fused = (*_elementwise(precision), *_adafactor(precision), *_adamw(precision))
        yield from ((f"fused, {precision}, {each.name}", each) for each in fused)
        for kind in kinds(capability):
            yield from ((f"{kind}, {precision}, {each.name}", each) for each in configurations(kind, precision))
        if "int8" in kinds(capability):
            yield from ((f"int8, {precision}, {each.name}", each) for each in _convolutions(precision))


def configurations(kind: str, precision: str) -> Iterator[Configuration]:
    """Yield all launches of layers in an 8-bit format and a precision."""
    import triton.language as tl

    from kohya_ext.quantization import kernels
    from kohya_ext.quantization.linear import KINDS as BY_NAME

    dtype = {"bf16": tl.bfloat16, "fp16": tl.float16}[precision]
    eight_bits, stored = BY_NAME[kind], f"*{KINDS[kind]}"
    rotated = eight_bits in ROTATED
    for width in WIDTHS:
        blocks, warps = kernels.launch(width)
        for is_gradient in (False, True):
            constants = {"ROTATED": rotated and not is_gradient, "HAS_FACTORS": is_gradient, "DTYPE": dtype, "MATRIX": dtype}
            constants |= {"LARGEST": LARGEST[eight_bits], "TINY": TINY, "BLOCKS": blocks, "SIZE": BLOCK}
            constants |= {} if is_gradient else {"factors": None}
            types = {"x": f"*{precision}", "out": stored}
            what = f"quantize {_NAMES[is_gradient]}, {width} columns"
            yield Configuration(what, kernels._quantize_rows, types, constants, warps, 3)
    for tile in (kernels.TILES, kernels.SMALL_TILES):
        sizes = dict(zip(("TILE_M", "TILE_N", "TILE_K"), tile, strict=False))
        for is_gradient in (False, True):
            constants = {"HAS_SCALES_B": not is_gradient, "HAS_BIAS": not is_gradient, "ROTATED": rotated and is_gradient}
            constants |= {"MATRIX": dtype, "GROUP": 8, "SIZE": BLOCK, "TILE_RANK": kernels.tile_of_rank(64), **sizes}
            constants |= {"scales_b": None, "bias": None} if is_gradient else {}
            types = {"a": stored, "b": stored, **dict.fromkeys(("out", "bias", "hidden", "up"), f"*{precision}")}
            for is_even, has_lora, unaligned in _SHAPES:
                words = ["even" if is_even else "uneven", *unaligned[:1], *(["LoRA"] if has_lora else [])]
                what = f"multiply {_NAMES[is_gradient]}, {tile[0]}x{tile[1]}, {' '.join(words)}"
                lora = {"HAS_LORA": has_lora, **({} if has_lora else {"hidden": None, "up": None})}
                every = {**constants, **lora, "EVEN": is_even}
                yield Configuration(what, kernels._multiply, types, every, *tile[3:], unaligned)


def _convolutions(precision: str) -> Iterator[Configuration]:
    import triton.language as tl

    from kohya_ext.quantization import convolution_kernels as kernels
    from kohya_ext.quantization.linear import KINDS as BY_NAME

    dtype = {"bf16": tl.bfloat16, "fp16": tl.float16}[precision]
    for channels in CHANNELS:
        part, is_kept, warps = kernels.launch(channels)
        for is_gradient in (False, True):
            constants = {"ROTATED": not is_gradient, "HAS_FACTORS": is_gradient, "DTYPE": dtype, "MATRIX": dtype, "TINY": TINY}
            constants |= {"LARGEST": LARGEST[BY_NAME["int8"]], "PIXELS": kernels.PIXELS, "PART": part, "IS_KEPT": is_kept}
            constants |= {"SIZE": BLOCK, **({} if is_gradient else {"factors": None})}
            what = f"pixels {_NAMES[is_gradient]}, {channels} channels"
            types = {"x": f"*{precision}", "out": "*i8"}
            yield Configuration(what, kernels._quantize_pixels, types, constants, warps, 3)
            yield Configuration(f"{what}, uneven area", kernels._quantize_pixels, types, constants, warps, 3, ("area",))
    for tile in (kernels.TILES, kernels.NARROW_TILES, kernels.SMALL_TILES):
        for is_gradient in (False, True):
            constants = {"IS_GRADIENT": is_gradient, "HAS_BIAS": not is_gradient, "MATRIX": dtype, "GROUP": 8, "SIZE": BLOCK}
            constants |= dict(zip(("TILE_P", "TILE_O", "TILE_K"), tile, strict=False))
            constants |= {"scales_w": None, "bias": None} if is_gradient else {}
            types = {"x": "*i8", "w": "*i8", **dict.fromkeys(("out", "bias"), f"*{precision}")}
            what = f"convolve {_NAMES[is_gradient]}, {tile[0]}x{tile[1]}x{tile[2]}"
            yield Configuration(what, kernels._convolve, types, constants, *tile[3:], ("images",))
            uneven = ("images", "height", "width")
            yield Configuration(f"{what}, uneven area", kernels._convolve, types, constants, *tile[3:], uneven)


def _elementwise(precision: str) -> Iterator[Configuration]:
    from kohya_ext.kernels import elementwise

    tensors = ("x", "gradient", "halves", "gate", "value", "grad_gate", "grad_value", "out")
    types = {**dict.fromkeys(tensors, f"*{precision}"), "table": "*fp32"}
    tile = {"TILE": elementwise._TILE}
    for name, kernel in (("input", elementwise._geglu), ("gradient", elementwise._geglu_backward)):
        yield Configuration(f"gate {name}", kernel, types, tile, 4, 3)
    for name, kernel in (("input", elementwise._swiglu), ("gradient", elementwise._swiglu_backward)):
        yield Configuration(f"gate of two tensors {name}", kernel, types, tile, 4, 3)
    for name, sign in (("input", 1), ("gradient", -1)):
        for pairs, halves in (("rotation", False), ("rotation of halves", True)):
            constants = {**tile, "SIGN": sign, "WIDTH": 128, "HALVES": halves}
            yield Configuration(f"{pairs} {name}", elementwise._rotate, types, constants, 4, 3)


def _adafactor(precision: str) -> Iterator[Configuration]:
    from kohya_ext.kernels import adafactor_kernels as kernels

    names = ("gradient", "weight", "out")
    numbers = (
        "of_rows",
        "of_columns",
        "of_weights",
        "of_updates",
        "rows",
        "columns",
        "row_factors",
        "column_factors",
        "divisor",
    )
    types = {**dict.fromkeys(names, f"*{precision}"), **dict.fromkeys(numbers, "*fp32"), "random": "*i32", "lower": "*i16"}
    types |= dict.fromkeys(("rate", "decay", "beta", "eps"), "fp32")
    small = {"M": 3, "N": 3, "SIDE": kernels.SIDE, "TILE": kernels._TOGETHER["TILE"]}
    tile = {name: size for name, size in kernels._TILE.items() if name != "num_warps"}
    step = {"HAS_DECAY": True, "IS_ROUNDED": precision == "bf16"} | ({} if precision == "bf16" else {"random": None})
    steps = [("", {**step, "lower": None, "IS_MASTER": False})]
    if precision == "bf16":
        steps += [(" of master weights", {**step, "IS_MASTER": True})]
    updated = {**tile, "TILE_M": kernels._UPDATED["TILE_M"]}
    launched: tuple[tuple[str, Any, Mapping[str, Any]], ...] = (
        ("squares", kernels._adafactor_squares, tile),
        ("squares of the update", kernels._adafactor_squares_of_update, tile),
        ("squares of small matrices", kernels._adafactor_small_squares, small),
        *((f"update{of}", kernels._adafactor_update, {**updated, **each}) for of, each in steps),
        *((f"update of small matrices{of}", kernels._adafactor_update_small, {**small, **each}) for of, each in steps),
    )
    for what, kernel, constants in launched:
        yield Configuration(f"Adafactor's {what}", kernel, types, constants, 8, 3, ("count", "m"))


def _adamw(precision: str) -> Iterator[Configuration]:
    from kohya_ext.kernels import adamw_kernels as kernels

    if precision == "bf16":
        names = ("weight", "gradient", "average", "average_of_squares")
        numbers = ("of_gradient", "kept", "of_square", "correction", "eps", "rate", "decay")
        types = {**dict.fromkeys(names, "*bf16"), **dict.fromkeys(numbers, "fp32"), "seed": "*i64", "lower": "*i16"}
        for of, master in (("", {"lower": None}), (" of master weights", {})):
            constants = {"TILE": kernels._TILE["TILE"], "IS_MASTER": not master, **master}
            yield Configuration(f"AdamW's step{of}", kernels._adamw, types, constants, 4, 3, ("size",))


def resources(configuration: Configuration, capability: int) -> Resources:
    """Compile a kernel for a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, constants = configuration.kernel, dict(configuration.constants)
    types = {**_TYPES, **configuration.types}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    divisible = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if name not in constants and name not in configuration.unaligned
    }
    source = ASTSource(kernel, signature, constants, divisible)
    options = {"num_warps": configuration.warps, "num_stages": configuration.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        printed = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    assert usage is not None, printed
    return Resources(int(usage[1]), int(usage[2]), compiled.metadata.shared)


def main() -> int:
    """Compile all configurations, and write the output file after each GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, action="append", choices=SHARED, help="by default all")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    import triton

    document = json.loads(given.output.read_text(encoding="utf-8")) if given.output.is_file() else {}
    document["triton"] = triton.__version__
    gpus = document.setdefault("gpus", {})
    for capability in given.capability or SHARED:
        rows = gpus[str(capability)] = {}
        for name, each in launches(capability):
            needs = resources(each, capability)
            rows[name] = [needs.registers, needs.stack, needs.shared]
            if needs.stack or needs.shared > SHARED[capability]:
                print(f"sm_{capability}, {name}: {needs}", file=sys.stderr, flush=True)
        document["gpus"] = gpus = dict(sorted(gpus.items(), key=lambda row: int(row[0])))
        document |= results.kohya_ext_commit()
        given.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
