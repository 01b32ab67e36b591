"""Tables for `kernel_classes`: ATen ops by class, words of other ops, kernel names in order.

Names are ATen names without namespace and without the trailing underscore of the in-place form. They also split
Inductor kernel names into ops, so every name of several words must be listed.
"""

# The class of each ATen op, according to its main work.
OPS_BY_CLASS: dict[str, str] = {
    "gemm": """
        mm addmm bmm baddbmm addbmm mv addmv matmul matmul_backward linear linear_backward inner tensordot einsum
        chain_matmul bilinear _trilinear _addmm_activation _int_mm _scaled_mm _scaled_mm_v2 _grouped_mm
        _scaled_grouped_mm _scaled_grouped_mm_v2 _weight_int4pack_mm _weight_int8pack_mm _mixed_dtypes_linear
        linalg_matmul linalg_multi_dot _cslt_sparse_mm _sparse_semi_structured_linear _sparse_semi_structured_mm
        _sparse_semi_structured_addmm _sparse_mm _sparse_addmm sparse_sampled_addmm _cudnn_rnn _cudnn_rnn_backward
        miopen_rnn miopen_rnn_backward lstm gru
    """,
    "attention_forward": """
        scaled_dot_product_attention _scaled_dot_product_attention_math _scaled_dot_product_flash_attention
        _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention _flash_attention_forward
        _scaled_dot_product_fused_attention_overrideable _efficient_attention_forward _cudnn_attention_forward
        _native_multi_head_attention flex_attention
    """,
    "attention_backward": """
        _scaled_dot_product_flash_attention_backward _scaled_dot_product_efficient_attention_backward
        _scaled_dot_product_cudnn_attention_backward _scaled_dot_product_fused_attention_overrideable_backward
        _flash_attention_backward _efficient_attention_backward _cudnn_attention_backward flex_attention_backward
    """,
    "softmax": """
        softmax log_softmax _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data _safe_softmax
        _masked_softmax _masked_softmax_backward prepare_softmax_online cross_entropy_loss
    """,
    "norm": """
        layer_norm native_layer_norm native_layer_norm_backward rms_norm _fused_rms_norm _fused_rms_norm_backward
        batch_norm native_batch_norm native_batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward
        miopen_batch_norm miopen_batch_norm_backward _native_batch_norm_legit _native_batch_norm_legit_functional
        _native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_with_update_functional
        _batch_norm_no_update batch_norm_backward batch_norm_stats batch_norm_elemt batch_norm_update_stats
        batch_norm_gather_stats batch_norm_gather_stats_with_counts batch_norm_backward_reduce
        batch_norm_backward_elemt group_norm native_group_norm native_group_norm_backward instance_norm
        _weight_norm _weight_norm_interface _weight_norm_interface_backward
    """,
    "convolution": """
        convolution _convolution convolution_backward conv1d conv2d conv3d conv_transpose1d conv_transpose2d
        conv_transpose3d cudnn_convolution cudnn_convolution_transpose cudnn_convolution_relu
        cudnn_convolution_add_relu cudnn_convolution_backward_input cudnn_convolution_backward_weight
        miopen_convolution miopen_convolution_transpose miopen_depthwise_convolution _conv_depthwise2d
        conv_depthwise3d thnn_conv2d _slow_conv2d_forward _slow_conv2d_backward slow_conv3d slow_conv3d_forward
        slow_conv_dilated2d slow_conv_transpose2d
    """,
    "embedding_index": """
        embedding embedding_backward embedding_dense_backward embedding_bag _embedding_bag embedding_renorm
        _embedding_bag_forward_only _embedding_bag_dense_backward _embedding_bag_per_sample_weights_backward
        index index_put _index_put_impl _unsafe_index _unsafe_index_put _unsafe_masked_index
        _unsafe_masked_index_put_accumulate index_select index_add index_copy index_fill index_reduce gather
        scatter scatter_add scatter_reduce take take_along_dim put masked_select masked_scatter
        masked_scatter_backward nonzero nonzero_static one_hot repeat_interleave grid_sampler_2d
        grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward max_unpool2d max_unpool3d
        nll_loss_backward nll_loss2d_backward
    """,
    "sort_scan": """
        sort argsort msort topk kthvalue median nanmedian mode cumsum cumprod cummax cummin _cummax_helper
        _cummin_helper logcumsumexp _logcumsumexp _unique _unique2 unique_dim unique_consecutive searchsorted
        bucketize randperm multinomial isin associative_scan
    """,
    "reduction": """
        sum mean prod amax amin aminmax max min argmax argmin any all std var std_mean var_mean norm native_norm
        linalg_vector_norm frobenius_norm logsumexp nansum nanmean count_nonzero dot vdot linalg_vecdot trace
        bincount histc histogram equal _is_any_true _is_all_true sum_to_size segment_reduce _cdist_forward
        _cdist_backward _pdist_forward _ctc_loss _ctc_loss_backward nll_loss_forward nll_loss2d_forward _foreach_norm
        _foreach_max avg_pool1d avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward max_pool1d max_pool2d
        max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices
        max_pool3d_with_indices_backward adaptive_avg_pool1d adaptive_avg_pool2d _adaptive_avg_pool2d
        _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward adaptive_max_pool2d
        adaptive_max_pool2d_backward _low_memory_max_pool2d_with_offsets _low_memory_max_pool2d_offsets_to_indices
    """,
    "fft": "_fft_c2c _fft_r2c _fft_c2r stft istft",
    "optimizer": """
        _fused_adam _fused_adamw _fused_sgd _fused_adagrad _amp_foreach_non_finite_check_and_unscale
        _amp_update_scale _foreach_abs _foreach_add _foreach_addcdiv _foreach_addcmul _foreach_clamp_max
        _foreach_clamp_min _foreach_div _foreach_exp _foreach_lerp _foreach_log _foreach_maximum _foreach_minimum
        _foreach_mul _foreach_neg _foreach_pow _foreach_reciprocal _foreach_rsqrt _foreach_sign _foreach_sqrt
        _foreach_sub
    """,
    "copy_cast": """
        copy _to_copy clone contiguous to cat _cat concat stack _stack _chunk_cat split_with_sizes_copy
        constant_pad_nd pad reflection_pad1d reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward
        replication_pad1d replication_pad2d replication_pad2d_backward repeat tile flip roll rot90 slice_scatter
        select_scatter as_strided_scatter diagonal_scatter slice_backward select_backward diagonal_backward
        unfold_backward im2col col2im pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle
        quantize_per_tensor quantize_per_channel dequantize diag_embed lift_fresh_copy view_copy permute_copy
        expand_copy _foreach_copy _foreach_clone convert_element_type device_put as_strided_copy _reshape_copy
        resolve_conj to_padded_tensor _nested_from_padded _jagged_to_padded_dense_forward
        _padded_dense_to_jagged_forward _pack_padded_sequence _conj_physical conj_physical
    """,
    "memset_memcpy": """
        fill zero zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full scalar_tensor empty
        empty_like new_empty empty_strided new_empty_strided _foreach_zero _efficientzerotensor
    """,
    "elementwise": """
        abs acos acosh add addcdiv addcmul addr alpha_dropout angle arange asin asinh atan atan2 atanh bernoulli
        binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits bitwise_and
        bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor cauchy ceil celu clamp clamp_max
        clamp_min complex copysign cos cosh cross deg2rad digamma div dropout elu elu_backward eq erf erfc erfinv
        exp exp2 expm1 exponential eye fake_quantize_per_tensor_affine_cachemask feature_dropout floor
        floor_divide fma fmax fmin fmod frac ge gelu gelu_backward geometric glu glu_backward gt hardshrink
        hardsigmoid hardsigmoid_backward hardswish hardswish_backward hardtanh hardtanh_backward heaviside
        huber_loss huber_loss_backward hypot inductor_random inductor_seeds inductor_lookup_seed iota isfinite isinf
        isnan kl_div l1_loss le leaky_relu leaky_relu_backward lerp lgamma linspace log log10 log1p log2 log_normal
        log_sigmoid log_sigmoid_backward log_sigmoid_forward logaddexp logical_and logical_not logical_or
        logical_xor logit logit_backward logspace lt masked_fill maximum minimum mish mish_backward mse_loss
        mse_loss_backward mul nan_to_num native_dropout native_dropout_backward ne neg normal
        normal_functional outer poisson polar pow prelu _prelu_kernel _prelu_kernel_backward rand rand_like
        randint randint_like randn randn_like random reciprocal relu relu6 remainder renorm round
        rrelu_with_noise rsqrt rsub selu sgn sigmoid sigmoid_backward sign signbit silu silu_backward sin sinc
        sinh smooth_l1_loss smooth_l1_loss_backward soft_margin_loss softplus softplus_backward softshrink sqrt
        square sub tan tanh tanh_backward _thnn_fused_gru_cell _thnn_fused_gru_cell_backward _thnn_fused_lstm_cell
        _thnn_fused_lstm_cell_backward_impl threshold threshold_backward tril tril_indices triu triu_indices
        true_divide trunc uniform upsample_bicubic2d upsample_bicubic2d_backward upsample_bilinear2d
        upsample_bilinear2d_backward upsample_linear1d upsample_linear1d_backward upsample_nearest1d
        upsample_nearest1d_backward upsample_nearest2d upsample_nearest2d_backward upsample_nearest3d
        upsample_nearest3d_backward upsample_trilinear3d where xlogy _fused_dropout _masked_scale
        _fill_mem_eff_dropout_mask _transform_bias_rescale_qkv
    """,
}
OP_CLASSES: dict[str, str] = {op: name for name, ops in OPS_BY_CLASS.items() for op in ops.split()}

# Ops that move no bytes: a fused kernel's name may list them.
_VIEWS = """
    view _unsafe_view reshape _reshape_alias expand expand_as permute transpose t squeeze unsqueeze slice select
    split split_with_sizes unsafe_split chunk unbind alias detach as_strided diagonal unfold narrow flatten
    unflatten movedim lift_fresh view_as view_as_real view_as_complex broadcast_to broadcast_in_dim real imag
    _conj wait_tensor getitem sym_size sym_size_int
"""
VIEWS = frozenset(_VIEWS.split())

_BACKWARD = r"bwd|backward|bprop|cutlassB|dot_do_o|convert_dq|dk_?dv|_dq(?:_|$)"
_ATTENTION = r"attention|attn|fmha|sdpa|(?<![a-z])mha(?![a-z])"
_NORM = r"(?:layer|rms|batch|group|instance|weight)_?norm"
_CONVOLUTION = r"conv(?!er[tgs])"
_COMMUNICATION = (
    r"nccl|rccl|nvshmem|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|sendrecv|cross_device_reduce|"
    r"multimem_|deep_ep"
)
_ROTARY = r"rotary|(?<![a-z])rope(?![a-z])"
_OPTIMIZER = r"adam(?:w|ax)?(?![a-z])|adagrad|rmsprop|(?<![a-z])(?:sgd|lamb|lion|muon)(?![a-z])|optimizer"
Rules = tuple[tuple[str, str], ...]


def _rules(*rules: tuple[str, str]) -> Rules:
    """Return classes with their patterns of names in lower case: those that ignore case take four times as long."""
    return tuple((name, pattern.lower()) for name, pattern in rules)


# Words in other ops: custom ops (namespace::name) and autograd functions (CamelCase).
OP_WORDS = _rules(
    ("communication", rf"{_COMMUNICATION}|c10d|record_param_comms|symm_mem"),
    ("attention_backward", rf"^(?=.*(?:{_ATTENTION})).*(?:{_BACKWARD})"),
    ("attention_forward", _ATTENTION),
    ("elementwise", rf"{_ROTARY}|swi_?glu|geglu|silu_and_mul|gelu_and_mul"),
    ("embedding_index", r"embedding|lookup|embs?_|(?<![a-z])index|scatter|gather|jagged|sparse_(?:data|features)"),
    ("norm", _NORM),
    ("softmax", r"softmax|(?<!binary_)cross_?entropy"),
    ("convolution", _CONVOLUTION),
    ("optimizer", _OPTIMIZER),
    ("gemm", r"(?<!fb)gemm|matmul|(?<![a-z])(?:add|badd|b)?mm(?![a-z])|(?:bf16|f8|i8){2}bf16|linear(?![a-z])"),
    ("fft", r"(?<![a-z])[ir]?fft"),
    ("sort_scan", r"sort(?![a-z])|top_?k|cum(?:sum|prod)|scan(?![a-z])|unique|bucketize"),
    ("embedding_index", r"^fb(?:gemm)?::"),  # the remaining ones permute and check sparse features
    ("copy_cast", r"copy|(?<!broad)cast(?![a-z])|quantize|transpose|contiguous"),
)

# Kernel names, first match wins. Attention and convolution come before GEMM (implicit GEMM), fills and copies before
# elementwise patterns, embedding before optimizer (fused row-wise updates).
KERNEL_RULES = _rules(
    ("communication", _COMMUNICATION),
    (
        "attention_backward",
        rf"^(?=.*(?:{_ATTENTION}|flash_bwd|flash::)).*(?:{_BACKWARD})|compute_dot_do_o|convert_dq_to|"
        r"bwd_kernel_(?:dk_?dv|dq|fuse)|bwd_preprocess",
    ),
    ("attention_forward", rf"{_ATTENTION}|flash_fwd|flash::|flash_?mla|with(?:paged|ragged)?kvcache"),
    # Tensor lists: the functor shows what they do.
    ("reduction", r"multi_tensor_apply.*norm|lpnorm_cleanup|multi_tensor_apply.*LpMax"),
    ("copy_cast", r"multi_tensor_apply.*(?:copy|clone)"),
    ("memset_memcpy", r"multi_tensor_apply.*zero"),
    ("optimizer", r"multi_tensor_apply"),
    # WelfordOps (aten::var) and NormTwoOps (a vector's length) are reductions, not normalizations.
    ("reduction", r"at::native::reduce_kernel<|lastdim_reduce|DeviceReduce(?!ByKey)|DeviceSegmentedReduce"),
    ("memset_memcpy", r"FillFunctor|SubTensorOpWithScalar|memset|(?<![a-z])zero_?fill"),
    (
        "copy_cast",
        r"direct_copy_kernel|copy_device_to_device|(?:float|bfloat|half|fp)\d*\w*_copy_kernel|CatArrayBatched|"
        r"nchwToNhwc|nhwcToNchw|batched_transpose|transpose_[A-Z]+2[A-Z]+|SubTensorOpWithCast|convertTensor|"
        r"cast_?transpose|chunk_cat|split_with_sizes_copy|roll_cuda|flip_kernel|tensorTransformGeneric|"
        r"quantize(?!.*gemm)|(?:fp8|int8|8bit)_quant|transpose_readWrite|reflection_pad|replication_pad|"
        r"unfold_backward",
    ),
    (
        "norm",
        rf"{_NORM}|GammaBeta|RowwiseMoments|InternalGradients|(?<![a-z])(?:bn|ln)_?(?:fw|bw)|cuComputeGradInput",
    ),
    ("softmax", r"soft_?max|(?<!binary_)cross_?entropy"),
    ("elementwise", rf"{_ROTARY}|elemWiseRNN|LSTM_elementWise|GRU_elementWise|(?:lstm|gru)_cell"),
    (
        "convolution",
        rf"{_CONVOLUTION}|[a-z]\d*cudnn_\d|\dcudnn_|fprop|[dw]grad|winograd|igemm_(?:fwd|bwd|wrw)|bwd_weight|im2d?2?col|"
        r"col2im|cask_\w*::compute\w*Offsets|scalePackedTensor|miopen(?!.*(?:pool|softmax))",
    ),
    ("fft", r"(?<![a-z])(?:cu|roc|r|c)?fft|[sd]p(?:Radix|Vector|RealComplex)\d*"),
    (
        "sort_scan",
        r"RadixSort|radix_sort|bitonic|MergeSort|merge_sort|SegmentedSort|sort_(?:postprocess|kernel)|"
        r"sortKeyValue|top_?k|KthValue|tensor_kernel_scan|DeviceScan|DeviceCompactInit|DeviceSelect|DeviceUnique|"
        r"ReduceByKey|searchsorted|bucketize|selective_scan|lookback_scan|cum(?:sum|prod)|randperm|Multinomial|"
        r"unique|fill_(?:index_and_segment|reverse_indices)|(?<![a-z])(?:arg)?sort(?![a-z])|moe_align_block",
    ),
    (
        "embedding_index",
        r"embedding|(?<![a-z])embs?_|index_?(?:select|func|elementwise|put|copy|fill|add|reduce)|indexing_backward|"
        r"gpu_index_kernel|scatter|gather|compute_grad_weight|krn_partial|compute_num_of_partial|nonzero|"
        r"write_indices|grid_sampler|bounds_check_indices|linearize_index|permute_(?:\dD|indices)|permute_pooled|"
        r"recat_copy|offsets_range|to_dense_representation|jagged|nll_loss\w*_backward|NLLCriterion_updateGrad|"
        r"masked_select|reshape_and_cache|max_unpool|flag_kernel|compute_cuda_kernel",
    ),
    ("optimizer", rf"{_OPTIMIZER}|amp_(?:update_scale|foreach)|kPrecondition"),
    (
        "gemm",
        r"nvjet|(?<!fb)gemm|gemv|gemvx|cutlass|xmma|wgmma|Cijk_|splitK|cublas|hipblaslt|rocblas|tensile|matmul|"
        r"marlin|fused_moe|grouped_mm|(?<![a-z])(?:add|b|badd)?mm_?kernel|_mm_kernel|RNN_(?:block)?persist|"
        r"persistRNN|(?<![a-z])dot_kernel|GemmUniversal|ck::kernel_\w*dl",
    ),
    (
        "reduction",
        r"reduce|reduction|nll_loss|NLLCriterion|pool|histogram|ctc_loss|cdist|pdist|argm(?:ax|in)|norm_kernel",
    ),
    (
        "elementwise",
        r"elementwise|dropout|distribution_|random_|arange|linspace|tri[ul]|upsample|parallel_for|"
        r"act_and_mul|gated_act|swi_?glu|geglu|(?<![a-z])(?:si|ge|re)lu(?![a-z])|loops?_kernel|transform_bias",
    ),
    ("convolution", r"cudnn::|cask_"),
)

# Any other plain identifier is probably a user's Triton kernel: words between underscores.
WORDS = _rules(
    ("norm", r"norm(?:alize)?"),
    ("convolution", r"conv\dd?"),
    ("gemm", r"mm|bmm|dot|linear"),
    ("embedding_index", r"embed|lookup|index|take"),
    ("sort_scan", r"scan|rank"),
    ("reduction", r"sum|mean|max|min|amax|var|std|loss"),
    ("copy_cast", r"copy|cast|transpose|permute|cat|concat|pad|convert|quant|dequant|pack|unpack|split|stack|clone"),
    ("memset_memcpy", r"fill|zero|zeros"),
    ("elementwise", r"add|sub|mul|div|scale|bias|exp|log|sqrt|sigmoid|tanh|act|activation|relu|gelu|silu|mask|clamp"),
)
