"""FLOPs, reads and writes of ops that multiply matrices.

A multiply-add is 2 FLOPs. Causal attention counts half; an attention backward counts five products including the
recomputed scores, like torch.utils.flop_counter: these are the FLOPs a kernel executes.
"""

from math import prod

from stepscope.analysis.costs.op_calls import UNSEEN, Call, NotKnown, Work, broadcast, formula


def _product(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Return the shape of torch.matmul's result, and its FLOPs."""
    if not left or not right:
        raise NotKnown
    rows, inner = left[-2:-1], left[-1]
    columns = right[-1:] if len(right) > 1 else ()
    if inner != (right[-2] if len(right) > 1 else right[0]):
        raise NotKnown
    shape = broadcast(left[:-2], right[:-2]) + rows + columns
    return shape, 2 * inner * prod(shape)


@formula("""
    matmul mv dot vdot _int_mm (left right)
    mm bmm (left right out_dtype)
    addmm baddbmm addmv addmm_ baddbmm_ addmv_ _addmm_activation (bias left right)
    _scaled_mm (left right scale_a scale_b bias scale_result out_dtype)
""")
def _matmul(call: Call) -> Work:
    left, right = call.tensor("left"), call.tensor("right")
    shape, flops = _product(left.shape, right.shape)
    dtype = "int32" if call.name == "_int_mm" else None
    # An `out` tensor may take the position of a dtype.
    if "out_dtype" in call.arguments and call.values is not None and call.optional("out_dtype") is None:
        dtype = call.scalar_type("out_dtype") or dtype
    reads = [left, right, *call.given("bias", "scale_a", "scale_b", "scale_result")]
    return Work(flops, reads, [left.like(dtype, shape)], left.dtype)


@formula("linear (input weight bias)")
def _linear(call: Call) -> Work:
    left, weight = call.tensor("input"), call.tensor("weight")
    if not left.shape or not weight.shape or left.shape[-1] != weight.shape[-1]:
        raise NotKnown
    out = left.like(shape=left.shape[:-1] + weight.shape[:-1])
    return Work(2 * out.num_elements * left.shape[-1], [left, weight, *call.given("bias")], [out], left.dtype)


@formula("""
    _grouped_mm (self mat2 offs bias out_dtype)
    _scaled_grouped_mm (self mat2 scale_a scale_b offs bias scale_result out_dtype)
""")
def _grouped_matmul(call: Call) -> Work:
    """Return one product per group; if one side is a matrix, the groups divide it."""
    left, right = call.tensor("self"), call.tensor("mat2")
    if not {len(left.shape), len(right.shape)} <= {2, 3} or left.shape[-1] != right.shape[-2]:
        raise NotKnown
    shape: tuple[int, ...] = (left.shape[-2], right.shape[-1])
    flops = 2 * left.shape[-1] * prod(shape)
    if len(left.shape) == len(right.shape) == 3:
        flops *= left.shape[0]
        shape = (left.shape[0], *shape)
    elif len(left.shape) == len(right.shape):
        shape = (call.tensor("offs").num_elements, *shape)
    out = left.like(call.scalar_type("out_dtype"), shape)
    return Work(flops, [left, right, *call.given("scale_a", "scale_b", "offs", "bias")], [out], left.dtype)


@formula("""
    convolution _convolution convolution_overrideable (input weight bias stride padding dilation transposed
        output_padding groups)
    conv1d conv2d conv3d cudnn_convolution_relu (input weight bias stride padding dilation groups)
    conv_transpose1d conv_transpose2d conv_transpose3d (input weight bias stride padding output_padding groups
        dilation)
    cudnn_convolution (input weight padding stride dilation groups)
    cudnn_convolution_transpose (input weight padding output_padding stride dilation groups)
    miopen_convolution miopen_depthwise_convolution mkldnn_convolution (input weight bias padding stride dilation
        groups)
    miopen_convolution_transpose (input weight bias padding output_padding stride dilation groups)
    _slow_conv2d_forward thnn_conv2d (input weight kernel_size bias stride padding)
    _conv_depthwise2d conv_depthwise3d (input weight kernel_size bias stride padding dilation)
    slow_conv_transpose2d (input weight kernel_size bias stride padding output_padding dilation)
""")
def _convolution(call: Call) -> Work:
    source, weight = call.tensor("input"), call.tensor("weight")
    reads = [source, weight, *call.given("bias")]
    kernel = weight.shape[2:]
    if not kernel or len(source.shape) not in (len(weight.shape), len(weight.shape) - 1):
        raise NotKnown
    try:
        shape, is_transposed = _convolved(call, source.shape[-len(kernel) :], weight.shape)
    except NotKnown:
        return Work(None, reads, [UNSEEN], source.dtype)
    out = source.like(shape=source.shape[: -len(kernel) - 1] + shape)
    # Each output element (input element if transposed) meets the whole kernel of its group.
    flops = 2 * (source if is_transposed else out).num_elements * prod(weight.shape[1:])
    return Work(flops, reads, [out], source.dtype)


def is_depthwise(call: Call) -> bool:
    """Return whether a convolution has one input channel per group: then it has no matrix product."""
    source, weight = call.tensor("input"), call.tensor("weight")
    rank = len(weight.shape) - 2
    if rank < 1 or weight.shape[1] != 1 or len(source.shape) <= rank:
        return False
    channels = source.shape[-rank - 1]
    if "groups" not in call.arguments:
        return channels > 1 and "depthwise" in call.name
    return channels > 1 and (call.values is None or call.integer("groups") == channels)


def _convolved(call: Call, sizes: tuple[int, ...], weight: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
    """Return channels and sizes of the output, and whether the convolution is transposed."""
    count = len(sizes)
    is_transposed = "transpose" in call.name or ("transposed" in call.arguments and call.flag("transposed"))
    stride, padding = call.integers("stride", count), call.integers("padding", count)
    dilation = call.integers("dilation", count) if "dilation" in call.arguments else (1,) * count
    if min(stride) < 1:
        raise NotKnown
    spans = [step * (size - 1) + 1 for step, size in zip(dilation, weight[2:])]
    if not is_transposed:
        pairs = zip(sizes, padding, spans, stride)
        return (weight[0], *(max(0, (s + 2 * p - span) // step + 1) for s, p, span, step in pairs)), False
    extra = call.integers("output_padding", count)
    groups = call.integer("groups") if "groups" in call.arguments else 1
    places = zip(sizes, padding, spans, stride, extra)
    return (weight[1] * groups, *(max(0, (s - 1) * st - 2 * p + span + e) for s, p, span, st, e in places)), True


@formula("""
    convolution_backward (grad_output input weight bias_sizes stride padding dilation transposed output_padding groups
        output_mask)
""")
def _convolution_backward(call: Call) -> Work:
    grad, source, weight = call.tensor("grad_output"), call.tensor("input"), call.tensor("weight")
    mask = [*call.mask("output_mask"), False, False, False]
    product = 2 * (source if call.flag("transposed") else grad).num_elements * prod(weight.shape[1:])
    reads = [grad, *([weight] if mask[0] else []), *([source] if mask[1] else [])]
    grads = (source.like(), weight.like(), grad.like(shape=grad.shape[1:2]))
    writes = [tensor for tensor, wanted in zip(grads, mask) if wanted]
    return Work(product * (mask[0] + mask[1]), reads, writes, source.dtype)


@formula("cudnn_convolution_backward_input miopen_convolution_backward_input (self_size grad_output weight)")
def _convolution_backward_input(call: Call) -> Work:
    """For torch before 1.11, whose traces omit the length of number lists."""
    grad, weight = call.tensor("grad_output"), call.tensor("weight")
    return Work(2 * grad.num_elements * prod(weight.shape[1:]), [grad, weight], [UNSEEN], grad.dtype)


# Attention: (batch, heads, length, width), but (batch, length, heads, width) in these.
LENGTH_BEFORE_HEADS = {
    "_flash_attention_forward", "_flash_attention_backward", "_efficient_attention_forward",
    "_efficient_attention_backward", "flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_backward",
}  # fmt: skip


@formula("""
    scaled_dot_product_attention _scaled_dot_product_attention_math (query key value attn_mask dropout_p is_causal)
    _scaled_dot_product_flash_attention (query key value dropout_p is_causal)
    _scaled_dot_product_flash_attention_for_cpu (query key value dropout_p is_causal attn_mask)
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention (query key value attn_bias
        compute_log_sumexp dropout_p is_causal)
    _scaled_dot_product_fused_attention_overrideable (query key value attn_bias dropout_p is_causal)
    _flash_attention_forward (query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask
        scale window_size_left window_size_right)
    _efficient_attention_forward (query key value bias cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p
        custom_mask_type compute_log_sumexp scale seqlen_k window_size)
    _cudnn_attention_forward (query key value attn_bias cum_seq_q cum_seq_k max_q max_k compute_log_sumexp dropout_p
        is_causal)
    flash_attn::_flash_attn_forward (query key value dropout_p softmax_scale is_causal window_size_left
        window_size_right)
""")
def _attention(call: Call) -> Work:
    query, key, value = call.tensor("query"), call.tensor("key"), call.tensor("value")
    writes = [query.like(shape=query.shape[:-1] + value.shape[-1:])]
    if "compute_log_sumexp" in call.arguments:
        keeps_sums = None if call.values is None else call.flag("compute_log_sumexp")
    else:
        keeps_sums = "flash" in call.name
    if keeps_sums is not False:
        writes.append(UNSEEN if keeps_sums is None else query.like("float32", query.shape[:-1]))
    reads = [query, key, value, *call.given("attn_bias", "attn_mask", "bias")]
    return Work(_attention_flops(call, 1, 1), reads, writes, query.dtype)


@formula("""
    _scaled_dot_product_flash_attention_backward (grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q
        max_k dropout_p is_causal)
    _flash_attention_backward (grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p
        is_causal rng_state unused scale window_size_left window_size_right)
    _scaled_dot_product_flash_attention_for_cpu_backward (grad_out query key value out logsumexp dropout_p is_causal
        attn_mask)
    _scaled_dot_product_efficient_attention_backward (grad_out query key value attn_bias out logsumexp philox_seed
        philox_offset dropout_p grad_input_mask is_causal)
    _efficient_attention_backward (grad_out query key value bias out cu_seqlens_q cu_seqlens_k max_seqlen_q
        max_seqlen_k logsumexp dropout_p philox_seed philox_offset custom_mask_type bias_requires_grad scale
        num_splits_key window_size)
    _scaled_dot_product_cudnn_attention_backward _cudnn_attention_backward (grad_out query key value out logsumexp
        philox_seed philox_offset attn_bias cum_seq_q cum_seq_k max_q max_k dropout_p is_causal)
    flash_attn::_flash_attn_backward (grad_out query key value out logsumexp dq dk dv dropout_p softmax_scale
        is_causal window_size_left window_size_right)
""")
def _attention_backward(call: Call) -> Work:
    inputs = [call.tensor("query"), call.tensor("key"), call.tensor("value")]
    reads = [*inputs, *call.given("grad_out", "out", "logsumexp", "attn_bias", "attn_mask", "bias")]
    writes = [tensor.like() for tensor in inputs]
    if call.values is not None and "True" in (call.text("bias_requires_grad"), call.text("grad_input_mask")[-5:-1]):
        writes += [bias.like() for bias in call.given("attn_bias", "bias")]
    return Work(_attention_flops(call, 3, 2), reads, writes, inputs[0].dtype)


def _attention_flops(call: Call, num_wide: int, num_value_wide: int) -> int | None:
    """Return FLOPs of products over all pairs of positions, as wide as the queries and as the values.

    None if the trace does not tell whether the mask is causal, or if lengths differ within the batch.
    """
    query, key, value = (call.tensor(name).shape for name in ("query", "key", "value"))
    if not len(query) == len(key) == len(value) == 4 or call.given("cum_seq_q", "cu_seqlens_q", "seqlen_k"):
        return None
    length = 1 if call.name in LENGTH_BEFORE_HEADS else 2
    try:
        windows = {call.text(name) for name in ("window_size", "window_size_left", "window_size_right")}
        if "custom_mask_type" in call.arguments:
            is_causal = call.integer("custom_mask_type") != 0
        else:
            is_causal = call.flag("is_causal")
    except NotKnown:
        return None
    if not windows <= {"", "-1"}:
        return None
    widths = num_wide * query[-1] + num_value_wide * value[-1]
    flops = 2 * prod(query[:-1]) * key[length] * widths
    # The plain formulation computes the masked half too.
    return flops // 2 if is_causal and call.name != "_scaled_dot_product_attention_math" else flops
