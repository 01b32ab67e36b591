"""Every kernel has its class: names from real traces, the conflicts between op and name, fused kernels, tables."""

from __future__ import annotations

import csv
import gzip
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.analysis.kernels.kernel_classes import (
    KERNEL_CLASSES,
    UNCLASSIFIED,
    classify,
    classify_kernels,
    fused_ops,
)
from stepscope.analysis.kernels.kernel_name_tables import OP_CLASSES, OPS_BY_CLASS, VIEWS

DATA = Path(__file__).parent / "data"
CATALOG = DATA / "kernel_catalog_h200.json"
TRACES = Path(os.environ.get("STEPSCOPE_TRACES", Path(__file__).parents[2].parent / "shared" / "traces"))
KINDS = {
    "kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset",
    "Kernel": "kernel", "Memcpy": "memcpy", "Memset": "memset",  # before torch 2.0
}  # fmt: skip
with (DATA / "kernel_names.tsv").open(encoding="utf-8", newline="") as file:
    REAL = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))

ELEMENTWISE = (
    "at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >"
)
SUM = (
    "at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t<float, sum_functor> > >"
)
FILL = "at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >"
COPY = "at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl<at::native::direct_copy_kernel_cuda(...)>>"
RADIX_SORT = "at_cuda_detail::cub::detail::radix_sort::DeviceRadixSortOnesweepKernel<at_cuda_detail::cub::detail>"


def test_kernels_of_real_traces():
    found = [(classify(row["kernel"], row["op"] or None, row["kind"]), row) for row in REAL]

    assert [(name, row) for name, row in found if name != row["class"]] == []


def test_the_real_kernels_are_of_many_devices_and_classes():
    assert {"V100", "A100", "H100", "H200", "MI250", "MI300"} <= {row["device"] for row in REAL}
    assert set(KERNEL_CLASSES) - {row["class"] for row in REAL} == {"fft", "triton_fused", "other"}


@pytest.mark.parametrize(
    ("op", "kernel", "expected"),
    [
        # The op owns what its library does for it.
        ("aten::mm", "void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasLt::cublasSplitKParams)", "gemm"),
        ("aten::addmm", "reduce_1Block_kernel<float, 128, 7, cublasGemvTensorStridedBatched<float> >", "gemm"),
        ("aten::cudnn_convolution", "volta_sgemm_32x128_nn", "convolution"),
        (None, "volta_sgemm_32x128_nn", "gemm"),
        ("aten::convolution_backward", "void cudnn::cnn::reduce_wgrad_nchw_helper<float, float>", "convolution"),
        ("aten::convolution_backward", "void cudnn::ops::scalePackedTensor_kernel<float>", "convolution"),
        ("aten::_cudnn_attention_backward", "void cudnn::fusion::convert_dq_to_16bits<true>", "attention_backward"),
        ("aten::_flash_attention_forward", "some_new_kernel", "attention_forward"),
        ("aten::embedding_dense_backward", RADIX_SORT, "embedding_index"),
        ("aten::sort", RADIX_SORT, "sort_scan"),
        (None, RADIX_SORT, "sort_scan"),
        ("torch::autograd::CppNode<SplitLookupFunction_rowwise_adagrad_Op>", RADIX_SORT, "embedding_index"),
        ("aten::native_batch_norm_backward", SUM, "norm"),
        ("aten::native_group_norm", ELEMENTWISE, "norm"),
        ("aten::_softmax", "some_new_kernel", "softmax"),
        ("aten::scatter_add_", ELEMENTWISE, "embedding_index"),
        # A helper keeps its own class.
        ("aten::_scaled_dot_product_efficient_attention", FILL, "memset_memcpy"),
        ("aten::_flash_attention_backward", SUM, "reduction"),
        ("aten::addmm", COPY, "copy_cast"),
        ("aten::linear", ELEMENTWISE, "elementwise"),
        ("aten::convolution_backward", SUM, "reduction"),
        ("aten::convolution_backward", "batched_transpose_32x32_half", "copy_cast"),
        ("aten::cudnn_convolution", "void cudnn::ops::nchwToNhwcKernel<float, float>", "copy_cast"),
        ("aten::miopen_convolution", "SubTensorOpWithScalar1d", "memset_memcpy"),
        ("aten::index_put_", COPY, "copy_cast"),
        # A collective is one under every op.
        ("aten::mm", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("c10d::allreduce_", "some_new_kernel", "communication"),
        # Length of a vector and variance are reductions; normal numbers are not normalized.
        ("aten::linalg_vector_norm", "at::native::reduce_kernel<512, 1, NormTwoOps<float> >", "reduction"),
        (None, "at::native::reduce_kernel<512, 1, at::native::WelfordOps<float> >", "reduction"),
        ("aten::normal_", "at::native::distribution_elementwise_grid_stride_kernel<float, 4, normal>", "elementwise"),
        # Rotary embeddings embed nothing; binary cross-entropy has no softmax.
        ("vllm::rotary_embedding", "vllm::rotary_embedding_kernel<c10::BFloat16, true>", "elementwise"),
        ("aten::binary_cross_entropy_with_logits", ELEMENTWISE, "elementwise"),
        # An op that is not ATen's is a hint: it speaks where the name is silent.
        ("_LayerNormLinear", "nvjet_sm90_tst_128x128_64x6_1x2_h_bz_NTT", "gemm"),
        ("MyAttentionFunctionBackward", "_bwd_kernel", "attention_backward"),
        ("mylib::fused_attention", "cutlass::device_kernel<MyGemm>", "attention_forward"),
        ("LigerRMSNormFunction", "_kernel_0d1d2d", "norm"),
        ("autograd::engine::evaluate_function: EmbeddingBackward0", "_kernel", "embedding_index"),
        ("autograd::engine::evaluate_function: MulBackward0", COPY, "copy_cast"),
        ("autograd::engine::evaluate_function: SumBackward1", ELEMENTWISE, "elementwise"),
        ("CompiledFunction", "ampere_sgemm_128x64_nn", "gemm"),
        ("fbgemm::bounds_check_indices", "some_kernel", "embedding_index"),
        ("CompiledFunction", "_kernel", "other"),
        (None, "_fwd_kernel", "other"),
        ("aten::_foreach_norm", "multi_tensor_apply_kernel<LpNormFunctor<float> >", "reduction"),
        ("aten::_foreach_copy_", "multi_tensor_apply_kernel<CopyFunctor<float> >", "copy_cast"),
        ("aten::_foreach_lerp_", "multi_tensor_apply_kernel<TernaryOpScalar<float> >", "optimizer"),
    ],
)  # fmt: skip
def test_when_op_and_name_disagree(op, kernel, expected):
    assert classify(kernel, op) == expected


# Names from the sources of PyTorch, cuDNN, MIOpen, Composable Kernel, vLLM, xFormers, Liger and others.
KNOWN_BY_NAME = {
    "gemm": """
        nvjet_qqtst_128x256_128x4_1x2_h_bz_coopA_algo2_TNT sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize
        cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8 gemvx::kernel<float> hgemm_128x64_nn
        Custom_Cijk_Alik_Bljk_HHS_BH rocblas_gemvt_kernel<true> marlin::Marlin<half> fused_moe_kernel
        cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<int>> matmul_kernel kgemm_4bit_inference_naive
        hipblaslt_ext_op RNN_blockPersist_fp_LSTM
    """,
    "attention_forward": """
        flash::FlashAttnFwdSm90<float> fmha_cutlassF_bf16_aligned_64x64_rf_sm80 _attn_fwd
        vllm::paged_attention_v2_kernel<half> ck_tile::kentry<ck_tile::FmhaFwdKernel<float>>
        flash_fwd_splitkv_combine_kernel<int> flashinfer::BatchDecodeWithPagedKVCacheKernel<int>
        kernel_unified_attention_2d
        cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<int>>>
    """,
    "attention_backward": """
        flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<int> fmha_cutlassB_bf16_aligned_64x64
        flash_bwd_dot_do_o_kernel<true> flash::FlashAttnBwdSm90<float> _attn_bwd bwd_kernel_dk_dv bwd_kernel_dq
        flash_bwd_convert_dq_kernel<int> _attn_bwd_preprocess
    """,
    "softmax": """
        cunn_SpatialSoftMaxForward<float> softmax_warp_forward<float> liger_cross_entropy_kernel
        scaled_upper_triang_masked_softmax_warp_forward<half> vllm::moe::topkGatingSoftmax<int> MIOpenSoftmaxForward
    """,
    "norm": """
        MIOpenBatchNormFwdTrainSpatial bn_fw_tr_1C11_singleread<float> vllm::rms_norm_kernel<half>
        RowwiseMomentsCUDAKernel<float> transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<int>
        layer_norm::ln_bwd_kernel<int> _layer_norm_fwd_fused _rms_norm_backward_kernel GroupNormKernelImplInternal
    """,
    "convolution": """
        sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64
        sm80_xmma_wgrad_implicit_gemm_indexed_tf32f32 cutlass_tensorop_s1688dgrad_optimized_tf32_128x128_16x4
        conv_depthwise2d_forward_kernel<3> miopenSp3AsmConv_v30_3_1_gfx9_fp32_f2x3_stride1 naive_conv_fwd_nchw
        causal_conv1d_fwd_kernel<int> volta_fp16_s884cudnn_fp16_128x128_ldg8_relu im2col_kernel<float>
        dgrad2d_grouped_direct_kernel<int>
    """,
    "fft": """
        regular_fft<256u> vector_fft<128u> fft_rtc_fwd_len4096_factors_16_16_16_wgs_256 multi_bluestein_fft<int>
        spRadix0064B::kernel1Mem<unsigned> dpVector1024C::kernelMem<int>
    """,
    "sort_scan": """
        at::native::bitonicSortKVInPlace<int> at::native::sbtopk::gatherTopK<float>
        at::native::mbtopk::radixFindKthValues<float> selective_scan_fwd_kernel<int>
        rocprim::detail::lookback_scan_kernel at::native::tensor_kernel_scan_outer_dim<float>
        cub::DeviceMergeSortMergeKernel<int> vllm::moe::moe_align_block_size_kernel<int>
    """,
    "embedding_index": """
        at::native::indexSelectSmallIndex<float> EmbeddingBag_updateOutputKernel_sum_mean<float>
        at::native::grid_sampler_2d_kernel<float> at::native::_scatter_gather_elementwise_kernel<128>
        vllm::reshape_and_cache_flash_kernel<int> cub::DeviceFlaggedNonzero at::native::vectorized_gather_kernel<16>
    """,
    "optimizer": """
        multi_tensor_apply_kernel<TensorListMetadata<4>,AdamFunctor<float>> kOptimizer32bit2State<float>
        fused_adam_kernel _adamw_step
    """,
    "communication": """
        ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL rcclGenericKernel vllm::cross_device_reduce_1stage
        two_shot_all_reduce_kernel<int> nvshmemi_transfer deep_ep::internode::dispatch
        multimem_all_reduce_kernel<int>
    """,
    "copy_cast": """
        CatArrayBatchedCopy<int> transformer_engine::cast_transpose_kernel<int> kQuantizeBlockwise<half>
        at::native::float8_copy_kernel_cuda dynamic_per_token_scaled_fp8_quant_kernel<int> transpose_kernel
        at::native::reflection_pad2d_out_kernel<float> at::native::roll_cuda_kernel<float>
    """,
    "reduction": """
        at::native::nll_loss_forward_reduce_cuda_kernel_2d<float> cub::DeviceReduceKernel<int>
        at::native::max_pool_forward_nhwc<float> at::native::kernelHistogram1D<int> row_sum_kernel lpnorm_cleanup
    """,
    "elementwise": """
        at::native::fused_dropout_kernel_vec<float> vllm::act_and_mul_kernel<half> _swiglu_forward_kernel add_kernel
        _triton_rope at::native::triu_tril_kernel<float> _rope_embedding sigmoid_kernel_vectorized4_kernel
        at::native::upsample_bilinear2d_out_frame<float>
    """,
    "memset_memcpy": """
        zero_kernel memset32_post
    """,
    "other": """
        _kernel kernel_0 cusolver::getrf_pivot foo
    """,
}


@pytest.mark.parametrize(("expected", "kernels"), KNOWN_BY_NAME.items(), ids=KNOWN_BY_NAME)
def test_kernels_known_by_name_alone(expected, kernels):
    assert {kernel: classify(kernel, None) for kernel in kernels.split()} == dict.fromkeys(kernels.split(), expected)


@pytest.mark.parametrize("kind", ["memcpy", "memset"])
def test_what_the_driver_moves_is_not_the_ops_work(kind):
    assert classify("Memcpy HtoD (Pinned -> Device)", "aten::mm", kind) == "memset_memcpy"


@pytest.mark.parametrize(
    ("kernel", "ops"),
    [
        (
            "triton_per_fused__to_copy__unsafe_view_add_div_embedding_dense_backward_expand_mul_nll_loss_forward_pow_sum_3",
            "_to_copy _unsafe_view add div embedding_dense_backward expand mul nll_loss_forward pow sum",
        ),
        ("triton_poi_fused_slice_slice_backward_t_13", "slice slice_backward t"),
        ("triton_red_fused__log_softmax__log_softmax_backward_data_0", "_log_softmax _log_softmax_backward_data"),
        ("triton_red_fused_native_layer_norm_backward_sum_4", "native_layer_norm_backward sum"),
        ("triton_poi_fused_max_pool2d_with_indices_relu_7", "max_pool2d_with_indices relu"),
        ("triton_tem_fused_flex_attention_0", "flex_attention"),
        ("triton_poi_fused_add_frobnicate_0", "add frobnicate"),
        ("model_triton_poi_fused_add_0", "add"),
        ("triton_poi_fused_add_0_0d1d2d3de", "add"),
        ("triton_poi_fused_0", ""),
        ("triton_", ""),
        ("nvjet_sm90_tst_128x64_64x8_1x2_h_bz_TNT", ""),
    ],
)  # fmt: skip
def test_the_ops_a_fused_kernel_fuses(kernel, ops):
    assert fused_ops(kernel) == tuple(ops.split())


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        # Templates are what they template; around them the same op is only prepared.
        ("triton_tem_fused_addmm_relu_0", "gemm"),
        ("triton_tem_fused_bmm_softmax_1", "gemm"),
        ("triton_tem_fused_flex_attention_0", "attention_forward"),
        ("triton_tem_fused_flex_attention_flex_attention_backward_zeros_1", "attention_backward"),
        ("triton_tem_fused_convolution_relu_2", "convolution"),
        ("triton_tem_fused_0", "triton_fused"),
        ("triton_poi_fused_addmm_relu_3", "elementwise"),
        ("triton_poi_fused_addmm_3", "elementwise"),
        ("triton_poi_fused_convolution_3", "copy_cast"),
        ("triton_poi_fused__to_copy_bmm_transpose_3", "copy_cast"),
        ("triton_poi_fused_add_bmm_cos_mul_3", "elementwise"),
        ("triton_red_fused_mm_mul_3", "gemm"),
        ("triton_red_fused_flex_attention_backward_mul_sum_2", "attention_backward"),
        # Norm, softmax, scan, then plain reductions.
        ("triton_per_fused__to_copy_native_layer_norm_native_layer_norm_backward_sum_4", "norm"),
        ("triton_poi_fused__native_batch_norm_legit_no_training_relu_3", "norm"),
        ("triton_per_fused_add_embedding_mean_mul_pow_rsqrt_0", "norm"),
        ("triton_red_fused_add_mul_rsqrt_sub_var_mean_0", "norm"),
        ("triton_per_fused_add_div_expand_mul_pow_sum_view_14", "norm"),
        ("triton_red_fused_div_expand_mul_pow_sub_sum_1", "reduction"),
        ("triton_per_fused__softmax_add_2", "softmax"),
        ("triton_red_fused_amax_div_exp_sub_sum_2", "softmax"),
        ("triton_red_fused_exp_log_nll_loss_forward_prepare_softmax_online_2", "softmax"),
        ("triton_spl_fused_cumsum_0", "sort_scan"),
        ("triton_per_fused_sort_0", "sort_scan"),
        ("triton_red_fused_mse_loss_sum_0", "reduction"),
        ("triton_per_fused_gather_sum_0", "reduction"),
        ("triton_red_fused_0", "reduction"),
        ("triton_unk_fused__to_copy_add_mul_sum_3", "reduction"),
        # Pointwise: indirect access, arithmetic, copies, fills; a reduction in it is unrolled.
        ("triton_poi_fused_add_embedding_0", "embedding_index"),
        ("triton_poi_fused__to_copy_clone_sum_0", "elementwise"),
        ("triton_poi_fused__to_copy_cat_transpose_view_0", "copy_cast"),
        ("triton_poi_fused_transpose_view_0", "copy_cast"),
        ("triton_poi_fused_full_zeros_0", "memset_memcpy"),
        ("triton_poi_fused__to_copy_full_0", "copy_cast"),
        ("triton_poi_fused_frobnicate_0", "elementwise"),
        ("triton_poi_fused_0", "triton_fused"),
        ("triton_for_fused_add_addcdiv_addcmul_lerp_mul_sqrt_0", "optimizer"),
        ("triton_for_fused__foreach_add_0", "optimizer"),
        ("triton_for_fused_0", "triton_fused"),
    ],
)
def test_a_fused_kernel_is_what_it_fuses(kernel, expected):
    assert classify(kernel, None) == classify(kernel, kernel) == classify(kernel, "CompiledFunction") == expected


def test_before_torch_2_6_only_the_op_had_the_fused_name():
    assert classify("triton_", "triton_per_fused__softmax_add_2") == "softmax"
    assert classify("triton__0d1d2d3de", "CompiledFunction") == "triton_fused"


@given(st.text(), st.none() | st.text(), st.sampled_from(["kernel", "memcpy", "memset"]))
def test_any_text_has_a_class(kernel, op, kind):
    assert classify(kernel, op, kind) in KERNEL_CLASSES


OPS = sorted({*OP_CLASSES, *VIEWS})


@given(
    st.sampled_from(["poi", "red", "per", "tem", "for", "spl", "unk"]),
    st.lists(st.sampled_from([*OPS, "frobnicate"]), unique=True, max_size=8).map(sorted),
    st.integers(0, 500),
)
def test_any_fused_kernel_has_a_class_and_its_words(category, ops, number):
    name = "_".join(["triton", category, "fused", *ops, str(number)])

    assert "_".join(fused_ops(name)) == "_".join(ops)
    assert classify(name, None) not in {UNCLASSIFIED, "communication"}


@given(st.sampled_from(["aten::{}", "aten::{}_", "aten.{}.default"]), st.sampled_from(sorted(OP_CLASSES)))
def test_an_aten_op_decides_where_the_name_is_silent(form, op):
    assert classify("_kernel", form.format(op)) == OP_CLASSES[op]


def test_no_op_stands_in_two_classes():
    listed = [op for ops in OPS_BY_CLASS.values() for op in ops.split()]

    assert [op for op, count in Counter(listed).items() if count > 1] == []
    assert VIEWS.isdisjoint(listed)
    assert set(OPS_BY_CLASS) < set(KERNEL_CLASSES)


ROWS = st.lists(
    st.tuples(
        st.sampled_from(["attn_fwd", COPY, "triton_per_fused__softmax_0", "", "foo"]),
        st.sampled_from([None, "aten::mm", "aten::copy_"]),
        st.sampled_from(["kernel", "memcpy", "memset"]),
    )
)


@given(ROWS, st.sampled_from([pl.String, pl.Categorical]))
def test_a_table_keeps_its_rows_in_order(rows, dtype):
    kinds = pl.Enum(["kernel", "memcpy", "memset"])
    schema = {"name": dtype, "op": dtype, "kind": kinds}
    kernels = pl.DataFrame(rows, schema=schema, orient="row").with_row_index("row")

    classed = classify_kernels(kernels)

    assert classed.drop("class").equals(kernels) and classed.drop("class").schema == kernels.schema
    assert classed.schema["class"] == pl.Enum(KERNEL_CLASSES)
    assert classed["class"].to_list() == [classify(*row) for row in rows]


def test_a_table_without_any_op():
    kernels = pl.DataFrame({"name": ["attn_fwd", "foo"], "op": [None, None], "kind": ["kernel", "kernel"]})

    assert classify_kernels(kernels)["class"].to_list() == ["attention_forward", "other"]


def test_a_name_is_looked_at_once_however_many_rows_have_it(monkeypatch):
    calls = []
    monkeypatch.setattr(
        "stepscope.analysis.kernels.kernel_classes.classify", lambda *key: calls.append(key) or "gemm"
    )
    once = pl.DataFrame({"name": ["a", "b"], "op": [None, "aten::mm"], "kind": ["kernel", "kernel"]})

    classify_kernels(pl.concat([once] * 1000))

    assert sorted(calls, key=str) == [("a", None, "kernel"), ("b", "aten::mm", "kernel")]


def kernels_of_trace(path: Path) -> Iterator[tuple[str, str | None, str, float]]:
    """Name, op, kind and time of every kernel; the op by its external id, where the trace has one."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    ops = {}
    for event in events:
        if event.get("cat") in ("cpu_op", "Operator"):
            arguments = event.get("args", {})
            ops[arguments.get("External id", arguments.get("external id"))] = event["name"]
    ops.pop(None, None)
    for event in events:
        category = event.get("cat", "")
        kind = KINDS.get(category) or KINDS.get(
            {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}.get(category, "kernel")
        )
        if category in ("kernel", "Kernel", "gpu_memcpy", "gpu_memset", "Memcpy", "Memset"):
            arguments = event.get("args", {})
            op = ops.get(arguments.get("External id", arguments.get("external id")))
            yield event["name"], op, kind or "kernel", float(event.get("dur", 0))


@pytest.mark.long
@pytest.mark.skipif(not TRACES.is_dir(), reason=f"no traces in {TRACES}; set STEPSCOPE_TRACES")
@pytest.mark.parametrize(
    "path", sorted(TRACES.rglob("*.json.gz")), ids=lambda path: path.name.removesuffix(".json.gz")
)
def test_less_than_a_hundredth_of_real_kernel_time_is_unclassified(path):
    by_op, by_name = Counter(), Counter()
    for name, op, kind, duration in kernels_of_trace(path):
        by_op[classify(name, op, kind)] += duration
        by_name[classify(name, None, kind)] += duration

    assert by_op[UNCLASSIFIED] <= 0.01 * sum(by_op.values())
    assert by_name[UNCLASSIFIED] <= 0.01 * sum(by_name.values())


def catalog() -> dict[str, list[dict[str, str | int]]]:
    cases: dict[str, list[dict[str, str | int]]] = {}
    for row in json.loads(CATALOG.read_text(encoding="utf-8")) if CATALOG.is_file() else ():
        cases.setdefault(row["case"], []).append(row)
    return cases


@pytest.mark.skipif(not CATALOG.is_file(), reason="benchmarks/kernel_catalog.py has not been run on a GPU")
def test_the_slowest_kernel_of_each_catalogd_work_has_its_class():
    for case, rows in catalog().items():
        expected = str(rows[0]["expected_class"]).split("|")
        classed = [(classify(row["kernel"], row["op"], row["kind"]), row) for row in rows]
        if "copy_cast" not in expected:
            # Some small convolutions spend most of their time in the layout change that cuDNN puts before them.
            classed = [pair for pair in classed if pair[0] != "copy_cast"]

        found, slowest = max(classed, key=lambda pair: pair[1]["duration_ns"])

        assert found in expected, f"{case}: {slowest['op']}: {slowest['kernel']}"
