"""How PyTorch's CUDA reductions split their work, and the buffer they need if blocks combine results through memory.

A sum over rows of [rows, columns] (the gradient of a bias) can use as much as its input: 139 MB for 8192 × 2304 on an
H200. The rules are those of ATen's Reduce.cuh: threads per block, blocks per output.
"""

from __future__ import annotations

MAX_THREADS = 512
WARP = 32
MIN_VALUES, MAX_VALUES = 16, 256
"""Values summed by one thread: fewer do not justify another block, more are split."""


def buffer_bytes(
    *,
    num_outputs: int,
    num_inputs: int,
    is_inner: bool,
    is_dense: bool,
    num_dimensions: int,
    accumulator_bytes: int,
    num_processors: int,
    threads_per_processor: int = 2048,
) -> tuple[int, int]:
    """Return the bytes of a reduction's semaphores and of its buffer; (0, 0) if each output is one block's.

    `num_inputs` are reduced to each of `num_outputs`. `is_inner`: the reduced dimension is the fastest in memory.
    `is_dense`: the fastest dimension has stride 1.

    >>> buffer_bytes(num_outputs=2304, num_inputs=8192, is_inner=False, is_dense=True, num_dimensions=2,
    ...              accumulator_bytes=4, num_processors=132)
    (72, 139198464)
    """
    if num_inputs <= 1 or num_outputs == 0:
        return 0, 0
    first, second = (num_inputs, num_outputs) if is_inner else (num_outputs, num_inputs)
    vector = 1
    if is_dense and is_inner and first > 128 and num_dimensions == 1:
        first //= 4
    elif is_dense and not is_inner:
        vector = next(size for size in (4, 2, 1) if first % size == 0)
        first //= vector
    most = MAX_THREADS // vector
    first_power, second_power = (1 << (max(1, min(size, most)).bit_length() - 1) for size in (first, second))
    height = min(second_power, most // min(first_power, WARP))
    width = min(first_power, most // height)
    inputs_step = outputs_step = 1
    if is_inner:
        inputs_step *= width
    else:
        outputs_step *= width
    values = -(-num_inputs // inputs_step)
    is_split_over_warps = values >= height * MIN_VALUES or values >= MAX_VALUES
    if is_split_over_warps:
        inputs_step *= height
    else:
        outputs_step *= height
    values = -(-num_inputs // inputs_step)
    grid = -(-(num_outputs // vector) // outputs_step)
    wanted = num_processors * (threads_per_processor // (width * height))
    if not is_split_over_warps or values < MAX_VALUES or grid > wanted:
        return 0, 0
    blocks = max(min(-(-wanted // grid), -(-values // MIN_VALUES)), -(-values // MAX_VALUES))
    if blocks <= 1:
        return 0, 0
    size = accumulator_bytes * num_outputs * blocks
    return 4 * grid, size if is_inner else size * width * vector
