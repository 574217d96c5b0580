"""--fused_operations: as accurate as upstream's classes with less memory traffic, and the same training result."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.patches import fused_operations, skip_unit_scaling  # noqa: E402
from torch.utils._pytree import tree_iter  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from kohya_ext.config.settings import Settings  # noqa: E402
from kohya_ext.dry_run import autocast  # noqa: E402
from kohya_ext.patching.lora_modules import NETWORKS  # noqa: E402
from kohya_ext.patching.patch import Patcher  # noqa: E402
from kohya_ext.quantization import linear  # noqa: E402
from kohya_ext.quantization.linear import Linear, convert, dequantized  # noqa: E402
from tests.counting import recorded_operators  # noqa: E402

BATCH, TOKENS, HEADS, WIDTH, RANK = 2, 24, 2, 64, 8


class _Traffic(torch.utils._python_dispatch.TorchDispatchMode):
    """Sums the bytes that operators read and write."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in func.name():
            outputs = {argument.name for argument in func._schema.arguments if argument.is_out}
            inputs = {name: value for name, value in (kwargs or {}).items() if name not in outputs}
            tensors = [value for value in tree_iter((args, inputs, result)) if isinstance(value, torch.Tensor)]
            self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return result


def _activation(*shape):
    return torch.randn(BATCH, *shape)


def _lora(name):
    def build(modules):
        layer = torch.nn.Linear(WIDTH, 2 * WIDTH).requires_grad_(False)
        lora = modules(name).LoRAModule("a", layer, 1.0, RANK, 5)
        lora.apply_to()
        for weight in lora.parameters():
            torch.nn.init.normal_(weight, std=0.1)
        return layer.to, layer.forward, lora, [_activation(TOKENS, WIDTH)]

    return build


def _norm(name):
    def build(modules):
        norm = modules(name).RMSNorm(WIDTH)
        for weight in norm.parameters():
            torch.nn.init.normal_(weight, 1.0, 0.1)
        return norm.to, norm, norm, [_activation(HEADS, TOKENS, WIDTH)]

    return build


def _rotation(modules):
    flux = modules("library.flux_models")
    table = flux.rope(torch.arange(TOKENS)[None].float(), WIDTH, 10_000)[:, None]
    queries, keys = (_activation(TOKENS, HEADS, WIDTH).transpose(1, 2) for _ in range(2))
    return (lambda dtype: None), lambda q, k: torch.stack(flux.apply_rope(q, k, table)), torch.nn.Module(), [queries, keys]


def _token_rotation(modules):
    lumina = modules("library.lumina_models")
    rotations = torch.polar(torch.ones(BATCH, TOKENS, WIDTH // 2), torch.randn(BATCH, TOKENS, WIDTH // 2))
    x = _activation(TOKENS, HEADS, WIDTH)
    return (lambda dtype: None), lambda x: lumina.apply_rope(x, rotations), torch.nn.Module(), [x]


def _rotation_by_cosines(modules):
    functions = modules("library.hunyuan_image_utils")
    table = functions.get_1d_rotary_pos_embed(WIDTH, torch.arange(TOKENS).float())
    inputs = [_activation(TOKENS, HEADS, WIDTH) for _ in range(2)]
    return (lambda dtype: None), lambda *x: torch.stack(functions.apply_rotary_emb(*x, table)), torch.nn.Module(), inputs


def _gate(name):
    def build(modules):
        gate = modules(name).GEGLU(WIDTH, 4 * WIDTH)
        return gate.to, gate, torch.nn.Module(), [_activation(TOKENS, WIDTH)]

    return build


def _resnet(name):
    def build(modules):
        block = modules(name).ResnetBlock2D(WIDTH, WIDTH)
        return block.to, lambda x, emb: block(x, emb), torch.nn.Module(), [_activation(WIDTH, 4, 4), _activation(4 * 320)]

    return build


def _block(name):
    def build(modules):
        block = modules(name).BasicTransformerBlock(WIDTH, HEADS, WIDTH // HEADS, WIDTH)
        block.set_use_sdpa(True)
        return block.to, block, torch.nn.Module(), [_activation(TOKENS, WIDTH), _activation(7, WIDTH)]

    return build


def _flux(modules):
    flux = modules("library.flux_models")
    block = flux.DoubleStreamBlock(WIDTH, HEADS, 2.0)
    table = flux.rope(torch.arange(TOKENS + 7)[None].float(), WIDTH // HEADS, 10_000)[:, None]
    inputs = [_activation(TOKENS, WIDTH), _activation(7, WIDTH), _activation(WIDTH)]
    return block.to, lambda *given: torch.cat(block(*given, table), 1), torch.nn.Module(), inputs


def _chroma(modules):
    chroma, flux = modules("library.chroma_models"), modules("library.flux_models")
    block = chroma.SingleStreamBlock(WIDTH, HEADS, 2.0)
    table = flux.rope(torch.arange(TOKENS)[None].float(), WIDTH // HEADS, 10_000)[:, None]

    def function(x, *modulation):
        return block(x, table.expand(BATCH, *table.shape[1:]), chroma.ModulationOut(*modulation), torch.full((BATCH,), 7))

    return block.to, function, torch.nn.Module(), [_activation(TOKENS, WIDTH), *(_activation(1, WIDTH) for _ in range(3))]


def _sd3(modules):
    sd3 = modules("library.sd3_models")
    block = sd3.SingleDiTBlock(WIDTH, HEADS, 2.0, attn_mode="torch", x_block_self_attn=True, qk_norm="rms")
    for linears in (block.attn, block.attn2):
        torch.nn.init.normal_(linears.ln_q.weight, 1.0, 0.1)
        torch.nn.init.normal_(linears.ln_k.weight, 1.0, 0.1)

    def function(x, conditioning):
        qkv, qkv2, _ = block.pre_attention_x(x, conditioning)
        return torch.cat([sd3.attention(*values, WIDTH // HEADS, mode="torch") for values in (qkv, qkv2)], -1)

    return block.to, function, torch.nn.Module(), [_activation(TOKENS, WIDTH), _activation(WIDTH)]


def _rotation_by_angles(modules):
    anima = modules("library.anima_models")
    embedding = anima.VideoRopePosition3DEmb(head_dim=WIDTH, len_h=8, len_w=8, len_t=4)
    embedding.reset_parameters()
    angles = embedding.generate_embeddings((1, 1, 4, TOKENS // 4, WIDTH))
    queries = _activation(TOKENS, HEADS, WIDTH)
    return (
        (lambda dtype: None),
        lambda q: anima.apply_rotary_pos_emb(q, angles, tensor_format="bshd"),
        torch.nn.Module(),
        [queries],
    )


def _anima(modules):
    block = modules("library.anima_models").Block(WIDTH, WIDTH, HEADS, 2.0)
    parameters = modules("library.attention").AttentionParams.create_attention_params("torch", False)
    inputs = [_activation(1, 4, TOKENS // 4, WIDTH), _activation(1, WIDTH), _activation(7, WIDTH)]
    return block.to, lambda *given: block(*given, parameters), torch.nn.Module(), inputs


def _hunyuan_image(modules):
    block = modules("library.hunyuan_image_modules").MMDoubleStreamBlock(WIDTH, HEADS, 2.0)
    parameters = modules("library.attention").AttentionParams.create_attention_params("torch", False)
    parameters.img_len = TOKENS
    inputs = [_activation(TOKENS, WIDTH), _activation(7, WIDTH), _activation(WIDTH)]
    return block.to, lambda *given: torch.cat(block(*given, None, parameters), 1), torch.nn.Module(), inputs


def _with_loras(module, modules):
    """Return LoRA modules of all layers of a frozen module."""
    module.requires_grad_(False)
    layers = [layer for layer in module.modules() if type(layer) is torch.nn.Linear]
    kind = modules("networks.lora").LoRAModule
    loras = torch.nn.ModuleList([kind(f"lora{index}", layer, 1.0, RANK, 5) for index, layer in enumerate(layers)])
    for lora in loras:
        lora.apply_to()
    for weight in loras.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    return loras


def _attention(name):
    def build(modules):
        attention = modules(name).CrossAttention(WIDTH, WIDTH, HEADS, WIDTH // HEADS)
        attention.set_use_sdpa(True)
        loras = _with_loras(attention, modules)
        return attention.to, lambda *inputs: attention(*inputs), loras, [_activation(TOKENS, WIDTH)]

    return build


def _cross_attention(name):
    def build(modules):
        to, function, loras, inputs = _attention(name)(modules)
        return to, function, loras, [*inputs, _activation(7, WIDTH)]

    return build


def _anima_attention(modules):
    attention = modules("library.anima_models").Attention(WIDTH, None, HEADS, WIDTH // HEADS)
    parameters = modules("library.attention").AttentionParams.create_attention_params("torch", False)
    loras = _with_loras(attention, modules)
    return attention.to, lambda x: attention(x, parameters), loras, [_activation(TOKENS, WIDTH)]


CASES = {
    **{name: _lora(name) for name in NETWORKS},
    "library.sdxl_original_unet: attention": _attention("library.sdxl_original_unet"),
    "library.original_unet: attention": _attention("library.original_unet"),
    "library.sdxl_original_unet: cross-attention": _cross_attention("library.sdxl_original_unet"),
    "library.anima_models: attention": _anima_attention,
    "library.flux_models": _norm("library.flux_models"),
    "library.lumina_models": _norm("library.lumina_models"),
    "library.anima_models": _norm("library.anima_models"),
    "library.hunyuan_image_modules": _norm("library.hunyuan_image_modules"),
    "rotary embedding": _rotation,
    "library.anima_models: rotation": _rotation_by_angles,
    "library.lumina_models: rotation": _token_rotation,
    "library.hunyuan_image_utils: rotation": _rotation_by_cosines,
    "library.sdxl_original_unet: gate": _gate("library.sdxl_original_unet"),
    "library.original_unet: gate": _gate("library.original_unet"),
    "library.sdxl_original_unet: resnet": _resnet("library.sdxl_original_unet"),
    "library.original_unet: resnet": _resnet("library.original_unet"),
    "library.sdxl_original_unet": _block("library.sdxl_original_unet"),
    "library.original_unet": _block("library.original_unet"),
    "library.flux_models: block": _flux,
    "library.chroma_models: block": _chroma,
    "library.sd3_models: block": _sd3,
    "library.anima_models: block": _anima,
    "library.hunyuan_image_modules: block": _hunyuan_image,
}


def _results(build, modules, dtype, compute):
    """Return output and gradients for weights and activations of ``dtype`` under CUDA's autocast rules, and the bytes moved."""
    torch.manual_seed(0)
    to, function, trained, inputs = build(modules)
    to(dtype=dtype)
    inputs = [value.to(dtype).to(compute).requires_grad_() for value in inputs]
    if compute is torch.float64:
        to(dtype=compute)
        trained.to(compute)
    with (
        torch.autocast("cpu", dtype, enabled=dtype is compute is not torch.float32),
        autocast.cuda_rules(),
        _Traffic() as traffic,
    ):
        y = function(*inputs)
        weights = torch.linspace(-1, 1, y.numel(), dtype=compute).reshape(y.shape)
        (y * weights).sum().backward()
    return [y, *(value.grad for value in inputs), *(weight.grad for weight in trained.parameters())], traffic.bytes


def _relative_errors(results, exact):
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(results, exact, strict=True)]


@pytest.mark.parametrize("case", CASES)
def test_fused_operations_are_accurate_and_move_fewer_bytes(checkout, checkout_module, case):
    exact, theirs, build = {}, {}, CASES[case]
    for dtype in (torch.float32, torch.bfloat16):
        # The float64 result for weights and inputs rounded to ``dtype``.
        exact[dtype] = _results(build, checkout_module, dtype, torch.float64)[0]
        theirs[dtype] = _results(build, checkout_module, dtype, dtype)
    patches = {patch.name: patch for patch in (fused_operations.PATCH, skip_unit_scaling.PATCH)}
    patcher = Patcher(patches, Settings(fused_operations=True), checkout)
    fused_operations._counts.clear()
    patcher.arm()
    try:
        for dtype, limit in ((torch.float32, 1e-6), (torch.bfloat16, 0.02)):
            ours, moved = _results(build, checkout_module, dtype, dtype)
            upstream, moved_by_upstream = theirs[dtype]
            assert [value.dtype for value in ours] == [value.dtype for value in upstream]
            errors, upstream_errors = _relative_errors(ours, exact[dtype]), _relative_errors(upstream, exact[dtype])
            ratio = moved / moved_by_upstream
            print(f"{case} {dtype}: {ratio:.2f} of the bytes, error {max(errors):.1e}, upstream's {max(upstream_errors):.1e}")
            assert max(errors) < limit
            # A group norm's result is rounded once more. With PyTorch 2.15 the error of its block was 15% larger, with 2.14
            # less than 10%, and 27% on a processor without bf16 instructions.
            factor = 1.2 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else 1.3
            assert max(errors) < factor * max(upstream_errors) + 1e-7
            # Norms save casts only, and Lumina's rotation is a single pass in Triton's kernel only.
            assert ratio < 0.99 or (ratio == 1 and (dtype is torch.float32 or build is _token_rotation))
    finally:
        patcher.undo()
    assert fused_operations._counts


_CHANGES = {
    "nothing": lambda loras: None,
    "another rank": lambda loras: setattr(loras[1], "lora_down", torch.nn.Linear(WIDTH, RANK // 2, bias=False)),
    "another factor": lambda loras: setattr(loras[1], "multiplier", 0.5),
    "a bias": lambda loras: setattr(loras[1].org_forward.__self__, "bias", torch.nn.Parameter(torch.ones(WIDTH), False)),
    "trained weights": lambda loras: loras[1].org_forward.__self__.requires_grad_(True),
    "dropout": lambda loras: setattr(loras[1], "dropout", 1e-9),
    "frozen down weights": lambda loras: [lora.lora_down.requires_grad_(False) for lora in loras],  # as in networks.lora_fa
    "no LoRA": lambda loras: setattr(loras[1].org_forward.__self__, "forward", loras[1].org_forward),
    "an 8-bit layer": lambda loras: _quantize(loras[1]),
}


#: The same of layers in 8 bits.
_CHANGES_IN_8_BITS = {
    **{name: change for name, change in _CHANGES.items() if name not in ("trained weights", "an 8-bit layer")},
    "another format": lambda loras: _quantize(loras[1], torch.float8_e4m3fn),
    "another product": lambda loras: setattr(loras[1].org_forward.__self__, "products", "weights"),
}

_BASES = {"16 bits": _CHANGES, "8 bits": _CHANGES_IN_8_BITS}


def _quantize(lora, kind=torch.int8):
    layer = lora.org_forward.__self__
    if type(layer) is Linear:
        layer.weight = torch.nn.Parameter(dequantized(layer), requires_grad=False)
    convert(layer, kind, "operations", "cpu")
    lora.org_forward = Linear.forward.__get__(layer)


@pytest.mark.parametrize(("base", "change"), [(base, change) for base, changes in _BASES.items() for change in changes])
def test_layers_of_one_input_share_products_if_they_are_alike(checkout, checkout_module, base, change):
    def results(patch):
        patcher = Patcher({"fused_operations": patch}, Settings(fused_operations=True), checkout)
        fused_operations._counts.clear()
        patcher.arm()
        try:
            torch.manual_seed(0)
            _, function, loras, (x,) = _attention("library.sdxl_original_unet")(checkout_module)
            if base == "8 bits":
                [_quantize(lora) for lora in loras]
            _BASES[base][change](loras)
            if change == "another rank":
                loras[1].lora_up = torch.nn.Linear(RANK // 2, WIDTH, bias=False)
            y = function(x.requires_grad_())
            y.square().sum().backward()
            gradients = [None if weight.grad is None else weight.grad for weight in loras.parameters()]
            assert not any(fused_operations._SHARED in vars(lora) for lora in loras)
            return [y, x.grad, *gradients], fused_operations._counts["shared products"]
        finally:
            patcher.undo()

    ours, count = results(fused_operations.PATCH)
    theirs, _ = results(replace(fused_operations.PATCH, targets=()))
    assert count == (3 if change in ("nothing", "frozen down weights") else 0)
    for mine, upstreams in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, upstreams, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("base", _BASES)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputed_attention_shares_products_again(checkout, checkout_module, base, use_reentrant):
    patcher = Patcher({"fused_operations": fused_operations.PATCH}, Settings(fused_operations=True), checkout)
    fused_operations._counts.clear()
    patcher.arm()
    try:
        torch.manual_seed(0)
        _, function, loras, (x,) = _attention("library.sdxl_original_unet")(checkout_module)
        if base == "8 bits":
            [_quantize(lora) for lora in loras]
        results = []
        for run in (function, partial(checkpoint, function, use_reentrant=use_reentrant)):
            with patch.object(linear, "_operand", wraps=linear._operand) as operand:
                y = run(x.requires_grad_())
                y.square().sum().backward()
            passes = 1 if run is function else 2
            assert operand.call_count == (2 * passes if base == "8 bits" else 0), "one for three layers, one for the output"
            results.append([y, *(leaf.grad for leaf in (x, *loras.parameters()))])
            x.grad = None
            loras.zero_grad()
    finally:
        patcher.undo()
    assert fused_operations._counts["shared products"] == 3 + 6
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("base", _BASES)
def test_shared_products_are_those_of_the_input_at_each_call(checkout, checkout_module, base):
    patcher = Patcher({"fused_operations": fused_operations.PATCH}, Settings(fused_operations=True), checkout)
    patcher.arm()
    try:
        torch.manual_seed(0)
        loras = _attention("library.sdxl_original_unet")(checkout_module)[2]
        if base == "8 bits":
            [_quantize(lora) for lora in loras]
        layers = [lora.org_forward.__self__ for lora in loras[:3]]
        x = _activation(TOKENS, WIDTH)
        alone = [[layer(value).detach() for layer in layers] for value in (x, x + 1)]
        with torch.no_grad(), fused_operations._shared_input([layer.forward for layer in layers]) as count:
            assert count == 3
            first, again, second = layers[0](x), layers[0](x), layers[1](x)
            x += 1
            third = layers[2](x)
    finally:
        patcher.undo()
    for result, expected in zip((first, again, second, third), (alone[0][0], *alone[0][:2], alone[1][2]), strict=True):
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_fp16_overflows_no_earlier_than_upstream(checkout, checkout_module, name, is_quantized):
    """With a rank of 64 times alpha, a gradient of the up weight that is scaled at the end would be 64 times as large."""
    patcher = Patcher({"fused_operations": fused_operations.PATCH}, Settings(fused_operations=True), checkout)
    results = []
    for arm in (False, True):
        torch.manual_seed(0)
        layer = torch.nn.Linear(WIDTH, 2 * WIDTH).requires_grad_(False)
        if is_quantized:
            convert(layer, torch.int8, "operations", "cpu")
        if arm:
            patcher.arm()
        lora = checkout_module(name).LoRAModule("a", layer, 1.0, 64, 1)
        lora.apply_to()
        for weight in lora.parameters():
            torch.nn.init.normal_(weight, std=0.1)
        x = (_activation(TOKENS, WIDTH) + 1).requires_grad_()
        with torch.autocast("cpu", torch.float16):
            y = layer(x)
        y.backward(torch.full_like(y, 8192.0))
        results.append([y.detach(), x.grad, *(weight.grad for weight in lora.parameters())])
    patcher.undo()
    for theirs, ours in zip(*results, strict=True):
        assert theirs.isfinite().all()
        torch.testing.assert_close(ours, theirs, rtol=0.01, atol=0.01 * theirs.abs().max().item())


def test_arguments_may_be_given_by_name(checkout, checkout_module):
    """As a fork may do."""
    patcher = Patcher({"fused_operations": fused_operations.PATCH}, Settings(fused_operations=True), checkout)
    flux = checkout_module("library.flux_models")
    table = flux.rope(torch.arange(TOKENS)[None].float(), WIDTH, 10_000)[:, None]
    queries, keys = (_activation(HEADS, TOKENS, WIDTH) for _ in range(2))
    upstream = flux.apply_rope(queries, keys, table)
    fused_operations._counts.clear()
    patcher.arm()
    try:
        ours = flux.apply_rope(xq=queries, xk=keys, freqs_cis=table)
    finally:
        patcher.undo()
    assert fused_operations._counts["rotations"] == 2
    torch.testing.assert_close(ours, upstream)


def test_luminas_gate_is_that_of_upstream(checkout, checkout_module, monkeypatch):
    """The kernels, which need a GPU, are replaced by torch's operators; their own test compares them with float64."""
    patcher = Patcher({"fused_operations": fused_operations.PATCH}, Settings(fused_operations=True), checkout)
    layer = checkout_module("library.lumina_models").FeedForward(WIDTH, 4 * WIDTH, 8, None)

    def results():
        layer.zero_grad()
        y = layer(_activation(TOKENS, WIDTH))
        y.square().sum().backward()
        return [y, *(weight.grad for weight in layer.parameters())]

    def swiglu_backward(gradient, gate, value):
        inputs = [tensor.detach().requires_grad_() for tensor in (gate, value)]
        with torch.enable_grad():
            return torch.autograd.grad(torch.nn.functional.silu(inputs[0]) * inputs[1], inputs, gradient)

    kernels = SimpleNamespace(
        swiglu=lambda gate, value: torch.nn.functional.silu(gate) * value, swiglu_backward=swiglu_backward
    )
    torch.manual_seed(0)
    upstream = results()
    fused_operations._counts.clear()
    patcher.arm()
    try:
        for each in (kernels, None):
            monkeypatch.setattr("kohya_ext.kernels.fused.elementwise_kernels", lambda *_, each=each: each)
            torch.manual_seed(0)
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(results(), upstream, strict=True))
    finally:
        patcher.undo()
    assert fused_operations._counts["gates"] == 2


@pytest.mark.parametrize("name", ["library.flux_models", "library.lumina_models"])
def test_fp8_norm_equals_upstreams(checkout, checkout_module, name):
    norm = checkout_module(name).RMSNorm(WIDTH).to(torch.float8_e4m3fn).requires_grad_(False)
    patcher = Patcher({"fused_operations": fused_operations.PATCH}, Settings(fused_operations=True), checkout)
    x = _activation(TOKENS, WIDTH).bfloat16().requires_grad_()
    results = []
    for arm in (False, True):
        if arm:
            patcher.arm()
        y = norm(x)
        y.float().square().sum().backward()
        results.append((y, x.grad))
        x.grad = None
    patcher.undo()
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_unsupported_layers_use_upstreams_code(checkout, checkout_module):
    """Check dropout, trained base weights, and layers other than torch.nn.Linear."""
    patcher = Patcher({"fused_operations": fused_operations.PATCH}, Settings(fused_operations=True), checkout)
    kind = checkout_module("networks.lora").LoRAModule
    patcher.arm()

    class Other(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    fused_operations._counts.clear()
    try:
        for layer, more in (
            (torch.nn.Linear(8, 8).requires_grad_(False), {"dropout": 0.5}),
            (torch.nn.Linear(8, 8).requires_grad_(False), {"rank_dropout": 0.5}),
            (torch.nn.Linear(8, 8), {}),
            (Other(8, 8).requires_grad_(False), {}),
            (torch.nn.Conv2d(8, 8, 1).requires_grad_(False), {}),
        ):
            lora, before = kind("a", layer, **more), layer.forward
            lora.apply_to()
            x = torch.randn(2, 8, 1, 1) if isinstance(layer, torch.nn.Conv2d) else torch.randn(2, 8)
            assert torch.equal(layer(x), before(x)), "a new LoRA has zero up weights"
        assert not fused_operations._counts
    finally:
        patcher.undo()


@pytest.mark.parametrize("name", ["library.sdxl_original_unet", "library.original_unet"])
def test_weights_copied_together_change_no_bit(checkout, checkout_module, monkeypatch, name):
    def results(**more):
        torch.manual_seed(0)
        block = checkout_module(name).BasicTransformerBlock(WIDTH, HEADS, WIDTH // HEADS, WIDTH)
        block.bfloat16().requires_grad_(False).set_use_sdpa(True)
        kind = type("LoRAModule", (checkout_module("networks.lora").LoRAModule,), more)
        layers = [layer for layer in block.modules() if type(layer) is torch.nn.Linear]
        loras = torch.nn.ModuleList([kind(f"lora{index}", layer, 1.0, RANK, 5) for index, layer in enumerate(layers)])
        for lora in loras:
            lora.apply_to()
        for weight in loras.parameters():
            torch.nn.init.normal_(weight, std=0.1)
        x = _activation(TOKENS, WIDTH).bfloat16().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16), recorded_operators() as operators:
            y = block(x, _activation(7, WIDTH).bfloat16())
        y.float().square().sum().backward()
        return [y, x.grad, *(weight.grad for weight in loras.parameters())], operators

    patcher = Patcher({"fused_operations": fused_operations.PATCH}, Settings(fused_operations=True), checkout)
    fused_operations._counts.clear()
    patcher.arm()
    try:
        together, operators = results()
        assert "aten::cat" not in operators, "weights that share a product follow each other in memory"
        assert fused_operations._counts["copies"] == 20
        monkeypatch.setattr("kohya_ext.kernels.casts.together", lambda layers: nullcontext(0))
        singly, _ = results()
        assert fused_operations._counts["copies"] == 20
        monkeypatch.undo()
        results(forward=lambda self, x: self.org_forward(x) + self.lora_up.weight.float().sum())
        assert fused_operations._counts["copies"] == 20, "another network may use weights for more than products"
    finally:
        patcher.undo()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(together, singly, strict=True))


#: Case -> script, further arguments, operations that must be used.
RUNS = {
    "sdxl": ("sdxl_train_network.py", (), {"products", "shared products", "gates"}),
    "flux": ("flux_train_network.py", ("--network_train_unet_only",), {"products", "norms", "rotations"}),
    "chroma": ("flux_train_network.py", ("--network_train_unet_only",), {"products", "norms", "rotations"}),
    "lumina": ("lumina_train_network.py", (), {"products", "norms", "rotations", "gates"}),
    "sd3": ("sd3_train_network.py", (), {"products", "norms"}),
    "anima": ("anima_train_network.py", (), {"products", "shared products", "norms", "rotations"}),
    "hunyuan-image": ("hunyuan_image_train_network.py", (), {"products", "norms", "rotations"}),
    "sdxl fine-tune": ("sdxl_train.py", (), {"gates"}),
    "flux fine-tune": ("flux_train.py", (), {"norms", "rotations"}),
    "sd3 fine-tune": ("sd3_train.py", (), {"norms"}),
    "lumina fine-tune": ("lumina_train.py", (), {"norms", "rotations", "gates"}),
    "anima fine-tune": ("anima_train.py", (), {"norms", "rotations"}),
    "sd15 fine-tune": ("fine_tune.py", (), {"gates"}),
    "sd15": ("train_network.py", (), {"products", "shared products", "gates"}),
}

FAMILIES = {"chroma": "chroma"}


@pytest.mark.thorough
@pytest.mark.oldest
@pytest.mark.parametrize("case", ["flux", *(pytest.param(name, marks=pytest.mark.slow) for name in RUNS if name != "flux")])
def test_real_script_trains_to_the_same_tensors(checkout, train, case):
    script, more, expected = RUNS[case]
    runs = [
        train(checkout, script, *more, *flag, family=FAMILIES.get(case), env={"SPY_LOSSES": "1"})
        for flag in ((), ("--fused_operations",))
    ]
    plain, fused = runs
    assert "fused_operations" not in plain.report["facts"]
    assert {name for name, count in fused.report["facts"]["fused_operations"].items() if count >= 8} == expected
    assert fused.losses == pytest.approx(plain.losses, abs=1e-5)
    assert fused.tensors.keys() == plain.tensors.keys()
    assert max((tensor - plain.tensors[name]).abs().max().item() for name, tensor in fused.tensors.items()) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("script", ["sdxl_train_network.py", "flux_train_network.py", "lumina_train_network.py"])
def test_bf16_is_as_close_to_float32_as_without_the_patch(checkout, train, script):
    bf16 = ("--mixed_precision", "bf16")
    exact, plain, fused = (
        train(checkout, script, "--max_train_steps", "20", "--network_train_unet_only", *options, env={"SPY_LOSSES": "1"})
        for options in ((), bf16, (*bf16, "--fused_operations"))
    )

    (plain_losses, plain_weights), (losses, weights) = plain.distance_from(exact), fused.distance_from(exact)
    print(
        f"\n{script} ({checkout.label}): distance from float32: losses {losses:.2e} (without {plain_losses:.2e}), "
        f"weights {weights:.2e} (without {plain_weights:.2e})"
    )
    assert 0 < losses < 1.5 * plain_losses
    assert 0 < weights < 1.5 * plain_weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "precision"),
    [*((f"{name}_train_network.py", "no") for name in ("sdxl", "flux", "lumina")), ("sdxl_train_network.py", "bf16")],
)
def test_compiled_blocks_are_unchanged(checkout, train, script, precision):
    """In compiled blocks the compiler fuses: the patch changes neither graphs nor results. Weights are copied before them."""
    compiled = ("--selective_torch_compile", "--network_train_unet_only", "--mixed_precision", precision)
    compiled += ("--disable_patch", "needless_masks")  # attention without a mask is a graph of its own
    plain, fused = (train(checkout, script, *compiled, *more) for more in ((), ("--fused_operations",)))
    graphs = [
        {name: block["graphs"] for name, block in run.report["facts"]["selective_torch_compile"]["blocks"].items()}
        for run in (plain, fused)
    ]
    assert graphs[0] == graphs[1]
    assert fused.report["facts"]["selective_torch_compile"]["graph_breaks"] == 0
    assert (fused.report["facts"]["fused_operations"]["copies"] > 0) is (precision == "bf16")
    limit = {"no": 1e-5, "bf16": 1e-3}[precision]  # norms between the blocks are rounded to 16 bits
    assert max((tensor - plain.tensors[name]).abs().max().item() for name, tensor in fused.tensors.items()) <= limit
