"""Random traces of everything that an analysis looks at: nested or not, labeled or not, linked or not."""

from __future__ import annotations

from hypothesis import strategies as st

from trace_builder import AUTOGRAD, MAIN, TraceBuilder, us

NAMES = {
    "op": ["aten::mm", "aten::linear", "aten::add_", "c10d::allreduce_", "my::op"],
    "backward": ["autograd::engine::evaluate_function: MmBackward0", "MmBackward0"],
    "annotation": [
        "Optimizer.step#SGD.step",
        "Optimizer.zero_grad#SGD.zero_grad",
        "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
        "## forward ##",
        "## backward ##",
        "[pytorch|profiler] something",
        "stepscope.module/model.layer",
        "stepscope.module/model",
    ],
    "call": [
        "cudaLaunchKernel",
        "cudaDeviceSynchronize",
        "cudaMalloc",
        "cudaStreamBeginCapture",
        "cudaStreamEndCapture",
        "cudaGraphLaunch",
        "cuModuleLoadData",
    ],
    "python": [
        "train.py(3): main",
        "nn.Module: Linear_0",
        "nn.Module: Model_0",
        "torch/_dynamo/convert_frame.py(9): f",
    ],
    "kernel": ["gemm", "ncclDevKernel_AllReduce", "vectorized_elementwise_kernel"],
    "memcpy": ["Memcpy HtoD"],
    "memory": ["[memory]"],
}
KINDS = [*sorted(NAMES), "call", "call", "kernel", "kernel"]


@st.composite
def any_trace(draw: st.DrawFn, most_events: int = 24) -> TraceBuilder:
    """A trace of up to so many events in some hundred nanoseconds; calls and kernels share a few correlations."""
    builder = TraceBuilder()
    moment = st.integers(0, 300)
    for number in range(draw(st.integers(0, 3))):  # steps that leave gaps, touch, or overlap
        start = 90 * number + draw(st.sampled_from([0, 0, 5]))
        builder.step(number, us(start), us(draw(st.sampled_from([60, 90, 100]))))
    for _ in range(draw(st.integers(1, most_events))):
        kind = draw(st.sampled_from(KINDS))
        name = draw(st.sampled_from(NAMES[kind]))
        start, length = us(draw(moment)), us(draw(st.integers(0, 60)))
        thread = draw(st.sampled_from([MAIN, MAIN, AUTOGRAD]))
        number = draw(st.integers(1, 4))
        is_linked = draw(st.sampled_from([True, True, False]))
        link = number if is_linked else None
        if kind == "op":
            builder.op(name, start, length, thread, id=number, sequence=number, forward_thread=0)
        elif kind == "backward":
            builder.op(name, start, length, AUTOGRAD, id=number + 10, sequence=number, forward_thread=1)
        elif kind == "annotation":
            builder.annotation(name, start, length, thread)
        elif kind == "call":
            builder.call(name, start, length, thread, correlation=number, id=link)
        elif kind == "python":
            builder.python(name, start, length, thread)
        elif kind == "memory":
            builder.memory(start, 512, thread)
        else:
            category = "kernel" if kind == "kernel" else "gpu_memcpy"
            stream, device = draw(st.sampled_from([(7, 0), (7, 0), (8, 0), (7, 1)]))
            builder.kernel(
                name, start, length, stream=stream, device=device, correlation=link, id=number, category=category
            )
    return builder
