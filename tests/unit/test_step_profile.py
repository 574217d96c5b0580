"""Where the time of profiled steps goes: kinds of kernels, shares, parts of the model, memory and advice."""

import pytest

from kohya_ext.run import step_profile
from kohya_ext.run.step_profile import (
    DATA,
    PART,
    SAVING,
    DeviceEvent,
    HostEvent,
    Summary,
    kind_of_kernel,
    kind_of_operator,
    summarize,
    verdict,
)
from tests.counting import lines_run

MILLISECOND = 10**6
BLOCK = PART + "Block"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", "matmul"),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize32x32x16_stage4_warpsize2x2x1_ffma", "matmul"),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopA_bias_TNT", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>", "matmul"),
        ("void gemmSN_TN_kernel<float, 128, 16, 2, 4, 4, 4, true>", "matmul"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16, float>", "matmul"),
        ("nvjet_sm90_tst_168x128_64x5_1x2_h_bz_coopA_bias_TNN", "matmul"),
        ("triton_tem_fused_addmm_12", "matmul"),
        ("void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128>>", "attention"),
        ("fmha_cutlassB_bf16_aligned_64x64_k64_sm80(PyTorchMemEffAttention)", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_31_64x64x64", "attention"),
        ("sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64", "convolution"),
        ("void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>", "convolution"),
        ("void cudnn::ops::nchwToNhwcKernel<__nv_bfloat16, __nv_bfloat16, float>", "copy"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "elementwise"),
        (
            "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<at::native::direct_copy_kernel_cuda>>",
            "copy",
        ),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<2u>, 4u>", "copy"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "reduction"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>", "reduction"),
        ("void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float>(long, float)", "reduction"),
        ("void cunn_SoftMaxForward<8, float, float>", "reduction"),
        ("triton_poi_fused__scaled_dot_product_flash_attention_addmm_gelu_3", "elementwise"),
        ("triton_red_fused_native_layer_norm_5", "reduction"),
        ("triton_per_fused_add_mean_7", "reduction"),
        ("void at::native::multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>", "optimizer"),
        ("void kOptimizerStatic8bit2StateBlockwise<float, 0, 256, 1>", "optimizer"),
        ("Memcpy HtoD (Pinned -> Device)", "transfer"),
        ("Memcpy DtoH (Device -> Pageable)", "transfer"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("Memset (Device)", "copy"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("my_kernel", "other"),
    ],
)
def test_kernels_have_kinds(name, kind):
    assert kind_of_kernel(name) == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "matmul"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::mkldnn_convolution", "convolution"),
        ("aten::copy_", "copy"),
        ("aten::native_group_norm", "reduction"),
        ("aten::_foreach_addcdiv_", "optimizer"),
        ("aten::mul", "elementwise"),
    ],
)
def test_operators_have_kinds(name, kind):
    assert kind_of_operator(name) == kind


def test_unions_and_common_time():
    merged = step_profile.union([(5, 7), (0, 2), (1, 3), (3, 4), (6, 6)])
    assert merged == [(0, 4), (5, 7)]
    assert step_profile.total(merged) == 6
    assert step_profile.common([(0, 4), (5, 7)], [(3, 6)]) == 2
    assert list(step_profile.clipped([(0, 4), (5, 7)], (3, 6))) == [(3, 4), (5, 6)]


def in_milliseconds(event_type, begin, end, *rest):
    return event_type(begin * MILLISECOND, end * MILLISECOND, *rest)


def host(begin, end, name, thread=1, identity=0, sequence=-1, forward=0):
    return in_milliseconds(HostEvent, begin, end, name, thread, identity, sequence, forward)


def kernel(begin, end, name="gemm", operator=0):
    return in_milliseconds(DeviceEvent, begin, end, name, operator)


def test_idle_time_is_divided_between_data_saving_and_host():
    events = [host(0, 20, DATA), host(80, 100, SAVING)]
    kernels = [kernel(10, 40), kernel(30, 50, "vectorized_elementwise_kernel"), kernel(90, 95, "Memcpy DtoH")]
    summary = summarize(events, kernels, (0, 100 * MILLISECOND), 1, "cuda")
    assert summary.busy == pytest.approx(0.45)
    assert summary.shares["data"] == pytest.approx(0.1)
    assert summary.shares["saving"] == pytest.approx(0.15)
    assert summary.shares["transfers"] == pytest.approx(0.05)
    assert summary.shares["arithmetic"] == pytest.approx(0.4 * 30 / 50)  # overlapping kernels share the time
    assert summary.shares["memory traffic"] == pytest.approx(0.4 * 20 / 50)
    assert sum(summary.shares.values()) == pytest.approx(1)
    assert summary.shares["host"] == pytest.approx(0.3)


def test_copies_next_to_kernels_do_not_limit():
    summary = summarize([], [kernel(0, 90), kernel(0, 100, "Memcpy HtoD")], (0, 100 * MILLISECOND), 1, "cuda")
    assert summary.shares["transfers"] == pytest.approx(0.1)


def test_time_of_the_profiler_is_subtracted_from_the_host():
    kernels = [kernel(0, 40)]
    summary = summarize([], kernels, (0, 100 * MILLISECOND), 1, "cuda", usual=0.05)
    assert (summary.profiled, summary.wall) == pytest.approx((0.1, 0.05))
    assert summary.shares["host"] == pytest.approx(0.2)
    assert summary.shares["arithmetic"] == summary.kinds["matmul"] == pytest.approx(0.8)
    # Kernels alone take longer than a usual step: nothing is left for the host.
    summary = summarize([], kernels, (0, 100 * MILLISECOND), 1, "cuda", usual=0.03)
    assert (summary.wall, summary.shares["host"]) == pytest.approx((0.04, 0))
    assert summary.busy == pytest.approx(1)


def test_kernels_belong_to_the_part_that_created_the_autograd_node():
    events = [
        host(0, 10, BLOCK),
        host(1, 5, "aten::addmm", identity=1, sequence=7),
        host(2, 3, "cudaLaunchKernel"),
        # A recomputed block in the backward thread, whose nodes are numbered again.
        host(20, 40, "autograd::engine::evaluate_function: AddmmBackward0", thread=2, identity=2, sequence=7, forward=1),
        host(21, 25, "aten::mm", thread=2, identity=3),
        host(26, 30, "aten::addmm", thread=2, identity=4, sequence=3),
        host(31, 36, "autograd::engine::evaluate_function: MulBackward0", thread=2, identity=5, sequence=3, forward=2),
        host(32, 33, "aten::mul", thread=2, identity=6),
        host(50, 60, "Optimizer.step#AdamW.step"),
        host(51, 52, "aten::add_", identity=8),
    ]
    durations = {1: 1, 3: 2, 4: 3, 6: 4, 8: 5, 99: 6}
    kernels = [kernel(100 + 10 * start, 100 + 10 * start + durations[each], "k", each) for start, each in enumerate(durations)]
    summary = summarize(events, kernels, (0, 200 * MILLISECOND), 1, "cuda")
    assert {row.name: round(row.device * 1000) for row in summary.blocks if row.device} == {
        "Block forward": 1,
        "Block backward": 6,
        "Block recompute": 3,
        "optimizer": 5,
        "other": 6,
    }
    assert summary.phases == pytest.approx({"forward": 0.001, "backward": 0.006, "recompute": 0.003})
    assert summary.launches == 1
    rows = {row.name: row for row in summary.operators}
    assert rows["aten::addmm"].host == pytest.approx(0.007)  # without the launch inside
    assert rows["aten::addmm"].count == 2
    assert rows["(unknown)"].device == pytest.approx(0.006)


def test_steps_do_not_count_the_backward_pass_of_another_thread():
    backward = host(40, 90, "autograd::engine::evaluate_function: AddBackward0", thread=2, identity=2, sequence=1, forward=1)
    events = [host(0, 100, "step 1"), host(10, 20, "aten::add", identity=1, sequence=1), backward]
    rows = {row.name: row.host for row in summarize(events, [kernel(0, 1)], (0, 100 * MILLISECOND), 1, "cuda").operators}
    assert rows[step_profile.PYTHON] == pytest.approx(0.04)


def test_checkpointed_block_is_recomputed_by_its_autograd_node():
    events = [
        host(0, 10, BLOCK),
        host(1, 2, "aten::add", identity=1, sequence=5),
        host(20, 60, "autograd::engine::evaluate_function: CheckpointFunctionBackward", 2, 2, 5, 1),
        host(20, 60, "CheckpointFunctionBackward", 2, 3, 5, 1),
        host(30, 40, "aten::add", 2, 4, 0),
        host(45, 55, "autograd::engine::evaluate_function: AddBackward0", 2, 5, 0, 2),
    ]
    summary = summarize(events, [kernel(0, 1, "k", 4), kernel(1, 3, "k", 5)], (0, 100 * MILLISECOND), 1, "cuda")
    rows = {row.name: row for row in summary.blocks}
    assert rows["Block recompute"].device == pytest.approx(0.001)
    assert rows["Block recompute"].host == pytest.approx(0.03)
    assert rows["Block backward"].device == pytest.approx(0.002)


def test_values_are_per_step():
    events = [host(0, 10, "cudaStreamSynchronize"), host(20, 30, "cudaLaunchKernel"), host(40, 50, "cudaLaunchKernel")]
    summary = summarize(events, [kernel(0, 40), kernel(50, 60)], (0, 100 * MILLISECOND), 2, "cuda")
    assert (summary.wall, summary.waiting, summary.launches) == pytest.approx((0.05, 0.005, 1))
    (row,) = summary.kernels
    assert (row.device, row.count, row.kind) == (pytest.approx(0.025), 1, "matmul")


def test_memory_has_a_peak_and_its_part():
    events = [host(0, 50, BLOCK), host(50, 100, PART + "Other")]
    changes = [(10 * MILLISECOND, 100), (60 * MILLISECOND, 50), (70 * MILLISECOND, -150)]
    summary = summarize(events, [], (0, 100 * MILLISECOND), 1, "cuda", changes, allocated=1000)
    assert (summary.peak, summary.peak_in) == (1150, "Other forward")
    assert [size for _, size in summary.memory] == [1100, 1150, 1000]
    assert [seconds for seconds, _ in summary.memory] == pytest.approx([0.01025, 0.06025, 0.07025], abs=0.0005)


def test_long_timelines_keep_the_largest_value_of_each_interval():
    changes = [(time * 1000, 1 if time % 2 else -1) for time in range(100_000)]
    summary = summarize([], [], (0, 100 * MILLISECOND), 1, "cuda", changes, allocated=1)
    assert len(summary.memory) == 200
    assert {size for _, size in summary.memory} == {1}


def test_without_kernel_times_there_is_no_limit():
    summary = summarize([host(0, 10, "aten::mm", identity=1)], [], (0, 100 * MILLISECOND), 1, "cuda")
    assert (summary.busy, summary.shares) == (None, {})
    result = verdict(summary, {})
    assert (result.limit, result.advice) == (None, ())
    assert "no kernel times" in "\n".join(step_profile.lines(summary, result))


def test_on_the_cpu_operators_are_the_work():
    events = [
        host(0, 100, "step 1"),
        host(0, 40, "aten::linear", identity=1),
        host(0, 30, "aten::addmm", identity=2),
        host(50, 60, "aten::mul", identity=3),
    ]
    summary = summarize(events, [], (0, 100 * MILLISECOND), 1, "cpu")
    assert summary.busy == pytest.approx(0.5)
    assert summary.shares["host"] == pytest.approx(0.5)
    assert summary.shares["arithmetic"] == pytest.approx(0.4)
    rows = {row.name: row.host for row in summary.operators}
    assert rows[step_profile.PYTHON] == pytest.approx(0.05)


# --- verdict ---------------------------------------------------------------------------------------------------------


def limited_by(**shares):
    """Return a summary of a GPU in which the time is divided like this; spaces are underscores."""
    named = {name.replace("_", " "): share for name, share in shares.items()}
    kinds = {"matmul": named.get("arithmetic", 0.0), "elementwise": named.get("memory traffic", 0.0)}
    rest = dict.fromkeys(step_profile._ADVICE.keys() - named.keys(), 0.0)
    return Summary(1, 1.0, "cuda", 1.0, busy=0.9, shares={**named, **rest}, kinds=kinds, launches=21_300)


def options_of(advice):
    return [line.split(" ")[0] for line in advice]


def test_host_limit_names_graphs_only_where_they_apply():
    summary = limited_by(host=0.6, arithmetic=0.4)
    lora = {"network_module": "networks.lora", "mixed_precision": "bf16", "train_batch_size": 2}
    for off in ({"speed": "off"}, {"cuda_graphs": False}):
        result = verdict(summary, {**lora, **off})
        assert (result.limit, options_of(result.advice)[:2]) == ("host", ["--cuda_graphs", "--selective_torch_compile"])
    assert options_of(verdict(summary, lora).advice)[0] == "--selective_torch_compile", "the run has tried graphs by itself"
    assert "21,300 launches" in result.sentence
    assert "60%" in result.sentence
    assert "--train_batch_size 4" in "\n".join(result.advice)
    lora["speed"] = "off"
    preserved = {"output_preservation": "sks=person"}
    for without in (
        {"blocks_to_swap": 10},
        {"network_module": None},
        {"cuda_graphs": True},
        {"torch_compile": True},
        preserved,
    ):
        assert "--cuda_graphs" not in options_of(verdict(summary, {**lora, **without}).advice)
    dylora = {**lora, "network_module": "networks.dylora"}
    assert options_of(verdict(summary, dylora).advice) == ["--fused_operations", "--train_batch_size"]
    assert options_of(verdict(summary, {**lora, "cuda_graphs": True}).advice) == ["--train_batch_size"]


def test_traffic_limit_names_fusion():
    summary = limited_by(memory_traffic=0.7, arithmetic=0.3)
    bf16 = {"mixed_precision": "bf16"}
    assert options_of(verdict(summary, bf16).advice) == ["--selective_torch_compile", "--fused_operations"]
    assert options_of(verdict(summary, {**bf16, "selective_torch_compile": True}).advice) == []
    unfused = {**bf16, "sdpa": False, "xformers": None, "mem_eff_attn": False, "selective_torch_compile": True}
    assert options_of(verdict(summary, unfused).advice) == ["--sdpa"]
    assert options_of(verdict(summary, {**unfused, "xformers": True}).advice) == []


def test_arithmetic_limit_names_precision_and_recomputation():
    summary = limited_by(arithmetic=0.7, memory_traffic=0.1, host=0.1)
    assert options_of(verdict(summary, {"mixed_precision": "no"}).advice)[0] == "--mixed_precision"
    summary.phases = {"recompute": 0.2}
    (line,) = verdict(summary, {"mixed_precision": "bf16"}).advice
    assert line.startswith("--vram_budget auto")
    assert "20%" in line
    summary.phases = {}
    (line,) = verdict(summary, {"mixed_precision": "bf16"}).advice
    assert "only less work" in line


def test_data_limit_names_the_loader():
    summary = limited_by(data=0.5, arithmetic=0.5)
    advice = verdict(summary, {"mixed_precision": "bf16", "max_data_loader_n_workers": 4, "cache_latents": True}).advice
    assert advice[0].startswith("--max_data_loader_n_workers 8 ")
    assert options_of(advice)[1] == "--persistent_data_loader_workers"
    assert options_of(verdict(summary, {}).advice)[0] == "--cache_latents"


def test_other_limits_have_sentences_and_advice():
    swapped = verdict(limited_by(transfers=0.5), {"blocks_to_swap": 20})
    assert (swapped.limit, swapped.advice[0].split(",")[0]) == ("transfers", "--blocks_to_swap 10 copies fewer blocks")
    assert verdict(limited_by(saving=0.5), {}).limit == "saving"
    communication = verdict(limited_by(communication=0.5), {"gradient_accumulation_steps": 2})
    assert options_of(communication.advice) == ["--gradient_accumulation_steps"]


def test_frozen_models_that_run_in_each_step_are_named():
    summary = limited_by(arithmetic=0.9)
    summary.blocks = [
        step_profile.Row("VAE forward", device=0.3),
        step_profile.Row("text encoder forward", device=0.2),
        step_profile.Row("Block forward", device=0.5),
    ]
    lora = {"mixed_precision": "bf16", "network_module": "networks.lora"}
    unet_only = {**lora, "network_train_unet_only": True}
    assert verdict(summary, unet_only).advice[-2:] == (
        "--cache_latents --cache_latents_to_disk runs the VAE once per image (30% of the work)",
        "--cache_text_encoder_outputs runs the text encoders once per caption (20% of the work)",
    )
    assert "--cache_text_encoder_outputs" not in options_of(verdict(summary, lora).advice)
    cached = {**unet_only, "cache_latents": True, "cache_text_encoder_outputs": True}
    assert not {"--cache_latents", "--cache_text_encoder_outputs"} & {*options_of(verdict(summary, cached).advice)}


def test_tables_have_the_largest_rows():
    events = [host(0, 10, BLOCK), host(0, 9, "aten::addmm", identity=1)]
    summary = summarize(events, [kernel(0, 60, "gemm", 1), kernel(60, 70, "my_kernel")], (0, 100 * MILLISECOND), 1, "cuda")
    text = "\n".join(step_profile.lines(summary, verdict(summary, {"mixed_precision": "bf16"})))
    assert "60.0%" in text
    assert "Block forward" in text
    assert "gemm (matmul)" in text
    assert "the GPU's arithmetic is the limit: 60% of the time (matmul 60%)" in text
    data = summary.as_json()
    assert data["kernels"][0] == {"name": "gemm", "device": 0.06, "host": 0.0, "count": 1.0, "kind": "matmul"}


def test_names_of_kernels_are_short():
    name = "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>, " + 100 * "x"
    (row,) = summarize([], [kernel(0, 1, name)], (0, MILLISECOND), 1, "cuda").kernels
    assert row.name.startswith("vectorized_elementwise_kernel<8, CUDAFunctor_add<BFloat16>, x")
    assert len(row.name) == 100


def test_work_of_a_summary_grows_with_the_number_of_events_only():
    def work(launches):
        events, kernels, identity, now = [], [], 0, 0
        for _ in range(launches):
            identity += 3
            events += [
                HostEvent(now + 10 * depth, now + 900 - depth, "aten::op", 1, identity - depth, identity) for depth in range(3)
            ]
            events.append(HostEvent(now + 100, now + 200, "cudaLaunchKernel", 1))
            kernels.append(DeviceEvent(now + 500, now + 1500, "gemm", identity - 2))
            now += 1000
        summaries = []
        lines = lines_run(lambda: summaries.append(summarize(events, kernels, (0, now), 1, "cuda")))
        assert summaries[0].launches == launches
        return lines

    assert work(400) < 2.5 * work(200)
