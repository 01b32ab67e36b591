"""Reads and writes of norms, lookups, pools, losses and optimizers.

As in `traffic_formulas`: each operand once, each result once, by the op's own kernels, and 0 FLOPs.
"""

from math import prod

from stepscope.analysis.costs.op_calls import UNSEEN, Call, NotKnown, Tensor, Work, formula


def _statistics(source: Tensor, *shape: int) -> Tensor:
    """Return a mean or deviation: float32 for smaller dtypes, as on a GPU."""
    return Tensor(shape, "float64" if source.dtype == "float64" else "float32")


@formula("""
    native_layer_norm layer_norm (input normalized_shape weight bias)
    _fused_rms_norm rms_norm (input normalized_shape weight)
""")
def _layer_norm(call: Call) -> Work:
    source = call.tensor("input")
    width = len(call.integers("normalized_shape")) if call.values is not None else 1
    rows = _statistics(source, prod(source.shape[: len(source.shape) - width]))
    num_statistics = 2 if "layer" in call.name else 1
    return Work(0, call.given("input", "weight", "bias"), [source.like()] + [rows] * num_statistics, source.dtype)


@formula("""
    native_layer_norm_backward (grad_out input normalized_shape mean rstd weight bias output_mask)
    _fused_rms_norm_backward (grad_out input normalized_shape rstd weight output_mask)
    native_group_norm_backward (grad_out input mean rstd weight N C HxW group output_mask)
    native_batch_norm_backward (grad_out input weight running_mean running_var mean rstd train eps output_mask)
    batch_norm_backward (grad_out input weight running_mean running_var mean rstd update eps output_mask)
    cudnn_batch_norm_backward miopen_batch_norm_backward (input grad_out weight running_mean running_var mean rstd)
""")
def _norm_backward(call: Call) -> Work:
    source, weight = call.tensor("input"), call.optional("weight")
    reads = [call.tensor("grad_out"), source, *call.given("mean", "rstd", "weight")]
    if "output_mask" not in call.arguments:
        mask = [True, True, True]
    elif call.values is None:
        return Work(0, reads, [UNSEEN], source.dtype)
    else:
        mask = call.mask("output_mask")
    channels = (weight if weight is not None else source.like(shape=source.shape[1:2])).like()
    writes = [tensor for tensor, wanted in zip((source.like(), channels, channels), mask) if wanted]
    return Work(0, reads, writes, source.dtype)


@formula("""
    native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit batch_norm _batch_norm_impl_index
        (input weight bias running_mean running_var training)
    _batch_norm_with_update (input weight bias running_mean running_var)
""")
def _batch_norm(call: Call) -> Work:
    """Without values, training is assumed, which writes four more rows of channels."""
    source = call.tensor("input")
    if len(source.shape) < 2:
        raise NotKnown
    writes = [source.like()]
    if "training" not in call.arguments or call.values is None or call.flag("training"):
        running = [tensor.like() for tensor in call.given("running_mean", "running_var")]
        writes += [*running, *[_statistics(source, source.shape[1])] * 2]
    return Work(0, call.given("input", "weight", "bias", "running_mean", "running_var"), writes, source.dtype)


@formula("native_group_norm (input weight bias N C HxW group)")
def _group_norm(call: Call) -> Work:
    source = call.tensor("input")
    rows = _statistics(source, call.integer("N"), call.integer("group"))
    return Work(0, call.given("input", "weight", "bias"), [source.like(), rows, rows], source.dtype)


# Lookups: read once, but never more than the whole table.


def _rows(table: Tensor, shape: tuple[int, ...]) -> Tensor:
    return table.like(shape=shape if prod(shape) < table.num_elements else table.shape)


@formula("embedding (weight indices) take (self index) index_select gather (self dim index)")
def _lookup(call: Call) -> Work:
    table, index = call.tensor(0), call.tensor("indices" if call.name == "embedding" else "index")
    shape = index.shape
    if call.name == "embedding":
        shape = index.shape + table.shape[1:]
    elif call.name == "index_select":
        dimension = call.integer("dim")
        if not -len(table.shape) <= dimension < len(table.shape):
            raise NotKnown
        dimension %= len(table.shape)
        shape = (*table.shape[:dimension], index.num_elements, *table.shape[dimension + 1 :])
    return Work(0, [index, _rows(table, shape)], [table.like(shape=shape)], table.dtype)


@formula("embedding_dense_backward embedding_backward (grad_output indices num_weights)")
def _embedding_backward(call: Call) -> Work:
    grad, indices = call.tensor("grad_output"), call.tensor("indices")
    rows = min(indices.num_elements, call.integer("num_weights"))
    return Work(0, [grad, indices], [grad.like(shape=(rows, *grad.shape[-1:]))], grad.dtype)


@formula("""
    scatter_ scatter_add_ index_add_ index_copy_ scatter_reduce_ (self dim index src)
    scatter scatter_add index_add index_copy scatter_reduce (self dim index src)
""")
def _scatter(call: Call) -> Work:
    """Reads the source at the index, and the target too if it adds; a copy before it is another op."""
    target, index = call.tensor("self"), call.tensor("index")
    source = call.optional("src")
    if call.name.startswith("index") and source is None:
        raise NotKnown
    shape = source.shape if source is not None and call.name.startswith("index") else index.shape
    touched = _rows(target, shape)
    reads = [index, *([source.like(shape=shape)] if source is not None else [])]
    if "add" in call.name or "reduce" in call.name:
        reads.append(touched)
    return Work(0, reads, [touched], target.dtype)


@formula("""
    max_pool2d_with_indices (self kernel_size stride padding dilation ceil_mode)
    avg_pool2d (self kernel_size stride padding ceil_mode)
""")
def _pool(call: Call) -> Work:
    source = call.tensor("self")
    if len(source.shape) < 3 or call.flag("ceil_mode"):
        raise NotKnown
    kernel, padding = call.integers("kernel_size", 2), call.integers("padding", 2)
    stride = call.integers("stride", 2) if call.integers("stride") else kernel
    dilation = call.integers("dilation", 2) if "dilation" in call.arguments else (1, 1)
    if min(stride) < 1:
        raise NotKnown
    places = zip(source.shape[-2:], kernel, padding, stride, dilation)
    sizes = tuple(max(0, (s + 2 * p - d * (k - 1) - 1) // st + 1) for s, k, p, st, d in places)
    out = source.like(shape=source.shape[:-2] + sizes)
    indices = [out.like("int64")] if call.name.startswith("max") else []
    return Work(0, [source], [out, *indices], source.dtype)


@formula("""
    max_pool2d_with_indices_backward (grad_output self kernel_size stride padding dilation ceil_mode indices)
    avg_pool2d_backward _adaptive_avg_pool2d_backward adaptive_max_pool2d_backward (grad_output self)
""")
def _pool_backward(call: Call) -> Work:
    source = call.tensor("self")
    return Work(0, [call.tensor("grad_output"), *call.given("indices")], [source.like()], source.dtype)


@formula("nll_loss_forward nll_loss2d_forward nll_loss (self target weight reduction)")
def _nll_loss(call: Call) -> Work:
    scores, target = call.tensor("self"), call.tensor("target")
    loss = target if call.integer("reduction") == 0 else Tensor((), None)
    picked = scores.like(shape=target.shape)
    writes = [scores.like(shape=loss.shape), scores.like(shape=())]
    return Work(0, [picked, target, *call.given("weight")], writes, scores.dtype)


@formula("nll_loss_backward nll_loss2d_backward (grad_output self target weight reduction ignore_index total_weight)")
def _nll_loss_backward(call: Call) -> Work:
    """One gradient per row; zeroing the rest is another op."""
    scores, target = call.tensor("self"), call.tensor("target")
    reads = call.given("grad_output", "target", "weight", "total_weight")
    return Work(0, reads, [scores.like(shape=target.shape)], scores.dtype)


# Optimizers. A trace has the shapes of a tensor list but not its dtype.


@formula("""
    _fused_adam_ _fused_adamw_ (self grads exp_avgs exp_avg_sqs max_exp_avg_sqs state_steps lr beta1 beta2
        weight_decay eps amsgrad maximize grad_scale)
    _fused_sgd_ (self grads momentum_buffer_list weight_decay momentum lr dampening nesterov maximize is_first_step
        grad_scale)
    _fused_adagrad_ (self grads state_sums state_steps lr lr_decay weight_decay eps maximize grad_scale)
""")
def _fused_optimizer(call: Call) -> Work:
    """Reads parameters, gradients and states; writes all but the gradients, and those too if it unscales them."""
    written = call.tensors("self")
    fresh: list[Tensor] = []
    if "exp_avgs" in call.arguments:
        written += call.tensors("exp_avgs") + call.tensors("exp_avg_sqs")
        written += call.tensors("max_exp_avg_sqs") if call.flag("amsgrad") else []
    elif "state_sums" in call.arguments:
        written += call.tensors("state_sums")
    elif call.operands[2]:
        fresh = call.tensors("momentum_buffer_list")
    grads = call.tensors("grads")
    steps = [step.like("float32") for step in call.tensors("state_steps")] if "state_steps" in call.arguments else []
    reads = [*written, *grads, *steps, *(fresh if fresh and not call.flag("is_first_step") else [])]
    if call.optional("grad_scale") is not None:
        written += grads
    return Work(0, reads, [tensor.like() for tensor in written + fresh], written[0].dtype)


_FOREACH = """
    abs add addcdiv addcmul ceil clamp_max clamp_min cos div erf exp expm1 floor lerp log log10 log1p log2 maximum
    minimum mul neg pow reciprocal round rsqrt sigmoid sign sin sqrt sub tan tanh trunc
"""


@formula(f"{' '.join(f'_foreach_{name} _foreach_{name}_' for name in _FOREACH.split())} ()")
@formula("_foreach_norm _foreach_max _foreach_copy_ _foreach_zero_ ()")
def _foreach(call: Call) -> Work:
    """Reads every list; writes the first, or one of its size."""
    first = call.tensors(0)
    lists = [operand for operand in call.operands if isinstance(operand, tuple)]
    if any(len(operand) != len(first) for operand in lists):
        raise NotKnown
    reads = [tensor for operand in lists for tensor in operand]
    reads += call.given(*range(len(call.operands)))
    writes = [tensor.like() for tensor in first]
    if call.name == "_foreach_copy_":
        reads = reads[len(first) :]
    elif call.name == "_foreach_zero_":
        reads = []
    elif call.name in ("_foreach_norm", "_foreach_max"):
        writes = [tensor.like(shape=()) for tensor in first]
    return Work(0, reads, writes, first[0].dtype)


@formula("_amp_foreach_non_finite_check_and_unscale_ (self found_inf inv_scale)")
def _unscale(call: Call) -> Work:
    grads = call.tensors("self")
    return Work(0, [*grads, *call.given("inv_scale")], [grad.like() for grad in grads], grads[0].dtype)
