"""Reads and writes of ops without matrix products: 0 FLOPs, their time is their bytes.

Bytes are the least that an op's own kernels move: each operand once, each result once. Zeros that an op requests
first, as in embedding_dense_backward, are another op in a trace.
"""

from math import prod

from stepscope.analysis.costs.op_calls import UNSEEN, Call, NotKnown, Tensor, Work, broadcast, formula, words

# Views, allocations and queries: no kernel.
FREE = words("""
    view _unsafe_view _reshape_alias view_as t numpy_T transpose transpose_ permute expand expand_as broadcast_to
    broadcast_tensors as_strided as_strided_ detach detach_ alias slice select narrow squeeze squeeze_ unsqueeze
    unsqueeze_ split split_with_sizes tensor_split unsafe_split chunk unbind unfold diagonal flatten unflatten
    movedim swapaxes real view_as_real view_as_complex conj _conj resolve_conj resolve_neg lift_fresh lift
    empty empty_like empty_strided new_empty new_empty_strided empty_permuted resize_ resize_as_ set_ record_stream
    result_type can_cast is_pinned is_nonzero size stride numel unflatten_dense_tensors _fused_sdp_choice
    _has_compatible_shallow_copy_type _nnpack_available
""")

_UNARY = """
    abs neg negative exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh sigmoid
    log_sigmoid erf erfc erfinv lgamma digamma reciprocal floor ceil round trunc frac sign sgn square relu relu6 gelu
    silu elu selu celu mish softplus softshrink hardshrink hardswish hardsigmoid hardtanh leaky_relu threshold
    nan_to_num logit positive bitwise_not logical_not isnan isinf isfinite signbit tril triu flip roll angle i0
"""
_BINARY = """
    add sub subtract rsub mul multiply div divide true_divide floor_divide remainder fmod pow float_power atan2
    maximum minimum fmax fmin hypot copysign eq ne lt le gt ge bitwise_and bitwise_or bitwise_xor bitwise_left_shift
    bitwise_right_shift logical_and logical_or logical_xor clamp_min clamp_max prelu _prelu_kernel heaviside xlogy
    threshold_backward tanh_backward sigmoid_backward gelu_backward silu_backward mish_backward elu_backward
    leaky_relu_backward hardtanh_backward hardswish_backward hardsigmoid_backward softplus_backward logit_backward
    native_dropout_backward masked_scale mse_loss smooth_l1_loss huber_loss l1_loss
"""
_TERNARY = """
    where addcmul addcdiv lerp clamp clip masked_fill mse_loss_backward smooth_l1_loss_backward huber_loss_backward
    log_sigmoid_backward binary_cross_entropy binary_cross_entropy_with_logits
"""
_ARITY = {name: arity for arity, names in enumerate((_UNARY, _BINARY, _TERNARY), 1) for name in names.split()}
_TO_BOOL = words("""
    eq ne lt le gt ge logical_and logical_or logical_xor logical_not isnan isinf isfinite signbit
""")
_TO_FLOAT = words("""
    exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh sigmoid erf erfc erfinv
    reciprocal div divide true_divide atan2 logit lgamma digamma
""")


@formula(f"{' '.join(f'{name} {name}_' for name in _ARITY)} ()")
def _elementwise(call: Call) -> Work:
    """Reads the tensors among the first `arity` arguments; a tensor after them is `out`."""
    base = call.name.removesuffix("_")
    reads = call.given(*range(_ARITY[base]))
    if not reads:
        raise NotKnown
    dtype = _result_dtype(call, reads, _ARITY[base])
    if base in _TO_FLOAT and _rank(dtype) < 2:
        dtype = "float32"
    if base != call.name:
        return Work(0, reads, [call.tensor(0)], call.tensor(0).dtype)
    # A condition or mask is read but does not decide the dtype.
    if base == "masked_fill":
        dtype = call.tensor(0).dtype
    elif base == "where":
        dtype = _result_dtype(call, call.given(1, 2) or reads, 3)
    given = next(iter(call.given(*range(_ARITY[base], len(call.operands)))), None)
    result = given.dtype if given is not None else "bool" if base in _TO_BOOL else dtype
    return Work(0, reads, [Tensor(broadcast(*(tensor.shape for tensor in reads)), result)], dtype)


def _rank(dtype: str | None) -> int:
    """Return 0 for bool, 1 for integers, 2 for floats, 3 for complex: the highest wins in promotion."""
    name = dtype or ""
    return 3 if name.startswith("complex") else 2 if "float" in name else 0 if name == "bool" else 1


def _result_dtype(call: Call, tensors: list[Tensor], arity: int) -> str | None:
    """Return the promoted dtype: tensors with dimensions decide, numbers only raise the rank."""
    if any(tensor.dtype is None for tensor in tensors):
        return None
    shaped = [tensor for tensor in tensors if tensor.shape]
    result = _widest([str(tensor.dtype) for tensor in shaped or tensors])
    numbers = [str(tensor.dtype) for tensor in tensors if not tensor.shape] if shaped else []
    texts = (call.values or ())[1:arity]
    numbers += ["float64" for text in texts if _is_fraction(text)]
    highest = max(numbers, key=_rank, default=result)
    if _rank(highest) > _rank(result):
        # A Python float is recorded as a double but promotes like torch's default dtype.
        return "float32" if highest == "float64" else highest
    return result


def _is_fraction(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return not text.lstrip("-").isdigit()


def _widest(dtypes: list[str]) -> str:
    rank = max(map(_rank, dtypes))
    names = {name for name in dtypes if _rank(name) == rank}
    if names == {"float16", "bfloat16"}:
        return "float32"
    return max(sorted(names), key=lambda name: Tensor((), name).num_bytes or 0)


_BESIDE = {"native_dropout": "bool", "_fused_dropout": "bool", "sort": "int64", "cummax": "int64", "cummin": "int64"}


@formula("copy_ (self src)")
def _copy(call: Call) -> Work:
    target, source = call.tensor("self"), call.tensor("src")
    return Work(0, [source], [target], target.dtype)


@formula("""
    clone split_with_sizes_copy _local_scalar_dense item (self)
    _to_copy (self dtype)
    native_dropout _fused_dropout ()
    _softmax _log_softmax (self dim half_to_float)
    softmax log_softmax cumsum cumprod (self dim dtype)
    sort argsort cummax cummin (self)
""")
def _same_shape(call: Call) -> Work:
    """Reads its input and writes as many elements; some also read an index or mask."""
    source = call.tensor(0)
    dtype = call.scalar_type("dtype") if "dtype" in call.arguments else None
    if call.name in ("cumsum", "cumprod") and dtype is None and _rank(source.dtype) < 2:
        dtype = "int64"
    if "half_to_float" in call.arguments and call.values is not None and call.flag("half_to_float"):
        dtype = "float32"
    results = ["int64" if call.name == "argsort" else dtype, *filter(None, [_BESIDE.get(call.name)])]
    return Work(0, [source], [source.like(result) for result in results], source.dtype)


@formula("to ()")
def _to(call: Call) -> Work:
    """A cast if the dtypes differ; otherwise a move or nothing, which the trace does not tell."""
    source = call.tensor(0)
    other = call.optional(1)
    wanted = call.scalar_type(2 if len(call.operands) == 6 else 1) if other is None else other.dtype
    if wanted is None or wanted == source.dtype:
        raise NotKnown
    return Work(0, [source], [source.like(wanted)], wanted)


@formula("contiguous (self memory_format) reshape (self)")
def _contiguous(call: Call) -> Work:
    source = call.tensor("self")
    if source.strides is None or (call.name == "contiguous" and call.text("memory_format") not in ("", "0")):
        raise NotKnown
    dense = [prod(source.shape[place + 1 :]) for place in range(len(source.shape))]
    if all(size == 1 or stride == step for size, stride, step in zip(source.shape, source.strides, dense)):
        return Work(0, [], [], source.dtype)
    if call.name == "reshape":
        raise NotKnown
    return Work(0, [source], [source.like()], source.dtype)


@formula("""
    fill_ zero_ normal_ uniform_ random_ bernoulli_ exponential_ log_normal_ (self)
    zeros_like ones_like rand_like randn_like (self dtype)
    full_like (self fill_value dtype)
""")
def _fill(call: Call) -> Work:
    target = call.tensor("self")
    dtype = call.scalar_type("dtype") if "dtype" in call.arguments and call.values is not None else None
    return Work(0, [], [target.like(dtype)], dtype or target.dtype)


@formula("""
    zeros ones rand randn (size dtype)
    full (size fill_value dtype)
    new_zeros new_ones (self size dtype)
    new_full (self size fill_value dtype)
""")
def _filled(call: Call) -> Work:
    own = call.optional("self")
    dtype = call.scalar_type("dtype") or (own.dtype if own is not None else "float32")
    return Work(0, [], [Tensor(call.integers("size"), dtype)], dtype)


@formula("cat _cat concat concatenate stack hstack vstack (tensors)")
def _concatenate(call: Call) -> Work:
    parts = call.tensors("tensors")
    return Work(0, parts, [part.like() for part in parts], parts[0].dtype)


@formula("""
    sum nansum prod mean (self dim keepdim dtype)
    amax amin logsumexp all any max min argmax argmin (self dim keepdim)
    std var std_mean var_mean (self dim correction keepdim)
    norm (self p dim keepdim)
    linalg_vector_norm (self ord dim keepdim dtype)
""")
def _reduction(call: Call) -> Work:
    source, other = call.tensor("self"), call.optional(1)
    if call.name in ("max", "min") and other is not None:
        result = source.like(shape=broadcast(source.shape, other.shape))
        return Work(0, [source, other], [result], source.dtype)
    # The overload that reduces everything has no dimension, at most a dtype or a norm's order.
    has_dimension = len(call.operands) > (3 if call.name == "norm" else 2)
    if has_dimension and call.values is None:
        return Work(0, [source], [UNSEEN], source.dtype)
    size = _kept(source.shape, call.integers("dim") if has_dimension else ())
    dtype = source.dtype
    if call.name in ("all", "any"):
        dtype = "bool"
    elif call.name in ("argmax", "argmin") or (call.name in ("sum", "nansum", "prod") and _rank(dtype) < 2):
        dtype = "int64"
    if "dtype" in call.arguments and call.values is not None:
        dtype = call.scalar_type("dtype" if has_dimension else 1) or dtype
    writes = [Tensor((size,), dtype)]
    if call.name in ("std_mean", "var_mean"):
        writes.append(Tensor((size,), dtype))
    elif call.name in ("max", "min") and has_dimension:
        writes.append(Tensor((size,), "int64"))
    return Work(0, [source], writes, source.dtype)


def _kept(shape: tuple[int, ...], dimensions: tuple[int, ...]) -> int:
    """Return the elements left after reducing these dimensions; all if none are named."""
    if not dimensions:
        return 1
    if not all(-len(shape) <= dimension < len(shape) for dimension in dimensions):
        if shape or not set(dimensions) <= {0, -1}:
            raise NotKnown
        return 1
    reduced = {dimension % len(shape) for dimension in dimensions}
    return prod(size for index, size in enumerate(shape) if index not in reduced)


@formula("topk (self k dim)")
def _topk(call: Call) -> Work:
    source = call.tensor("self")
    size = call.integer("k") * _kept(source.shape, (call.integer("dim"),))
    return Work(0, [source], [Tensor((size,), source.dtype), Tensor((size,), "int64")], source.dtype)


@formula("_softmax_backward_data _log_softmax_backward_data (grad_output output dim input_dtype)")
def _softmax_backward(call: Call) -> Work:
    grad, output = call.tensor("grad_output"), call.tensor("output")
    dtype = call.scalar_type("input_dtype") if call.values is not None else None
    return Work(0, [grad, output], [output.like(dtype)], output.dtype)
