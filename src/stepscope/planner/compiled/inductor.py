"""Runs Inductor without a GPU: from a graph to the Python that calls its kernels, run on planned tensors."""

import ast
import builtins
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from stepscope.devices.limits import Device
from stepscope.planner.emulation.planned_tensor import CPU, CUDA, PlannedTensor, like
from stepscope.planner.emulation.torch_support import replaced
from stepscope.planner.hardware import Hardware
from stepscope.recorder.machine.environment import products_in_tf32

DECIDERS = ("_should_pad", "should_pad_bench")  # the functions that run the benchmark; older versions have the second
HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class Padding:
    """While the context is active, Inductor pads what it would pad on a device, in graphs with host tensors."""

    def __init__(self, device: Device, is_tf32: bool) -> None:
        self._device, self._is_tf32 = device, is_tf32
        self._stack = ExitStack()
        self.products: dict[str, None] = {}  # rows × inner size × columns of padded products

    def __enter__(self) -> "Padding":
        from torch._inductor.fx_passes import pad_mm

        device = self._device
        replacement = replaced(
            *((pad_mm, name, self._is_padded) for name in DECIDERS),
            (pad_mm, "check_device", lambda first, second: True),
            (pad_mm, "has_triton", lambda: True),
            (pad_mm.utils, "get_device_tflops", lambda dtype: device.peak_flops[HALVES.get(dtype, "tf32")] / 1e12),
            (pad_mm.utils, "get_gpu_dram_gbps", lambda: device.bandwidth_bytes_per_s / 1e9),
            (torch.cuda, "get_device_capability", lambda index=None: device.compute_capability),
        )
        self._stack.enter_context(replacement)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def note(self) -> str | None:
        if not self.products:
            return None
        first, *more = self.products
        return (
            f"{first}{f' and {len(more)} more' * bool(more)}: rows do not begin at multiples of 16 bytes; assumed to "
            "be padded, which Inductor decides by a benchmark on the device"
        )

    def _is_padded(
        self, match: Any, first: torch.Tensor, second: torch.Tensor, op: Any, added: torch.Tensor | None = None
    ) -> bool:
        """Replaces the benchmark."""
        from torch._inductor.fx_passes import pad_mm

        sizes = (*first.shape[-2:], second.shape[-1])
        unit = pad_mm.get_alignment_size(first)
        is_tf32 = first.dtype is torch.float32 and (self._is_tf32 or products_in_tf32())
        is_padded = (
            any(pad_mm.get_padded_length(size, unit) for size in sizes)
            and (is_tf32 or first.dtype in HALVES)
            and has_unaligned_rows(first, second, unit)
            and bool(pad_mm.is_mm_compute_bound(*sizes, first.dtype))
        )
        if is_padded:
            self.products[" × ".join(map(str, sizes))] = None
        return is_padded


def has_unaligned_rows(first: torch.Tensor, second: torch.Tensor, unit: int) -> bool:
    """Return whether rows of an operand or of the result do not all begin at multiples of `unit` numbers.

    >>> tokens, words = torch.empty(64, 32), torch.empty(101, 32)
    >>> has_unaligned_rows(tokens, words.t(), 8), has_unaligned_rows(tokens, words[:96].t(), 8)
    (True, False)
    """
    return any(size % unit for size in (max(first.stride()[-2:]), max(second.stride()[-2:]), second.shape[-1]))


aten = torch.ops.aten
RNG_STATE_BYTES = 16
AfterOp = Callable[[Any, Any, Any, Any], None]


def lowered(
    module: Any, inputs: Sequence[Any], options: Mapping[str, Any], device: torch.device | None
) -> tuple[str, Mapping[str, Any]]:
    """Return the Python that Inductor writes for a graph, and the constants that it uses."""
    from torch._inductor import compile_fx
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    is_inference, is_backward = (options.get(name, False) for name in ("is_inference", "is_backward"))
    compile_fx.view_to_reshape(module)
    with torch.no_grad():
        fakes = compile_fx.fake_tensor_prop(module, inputs)
    compile_fx._recursive_record_original_output_strides(module)
    if device is not None:
        with fakes, torch.no_grad():
            inputs = _moved(module, inputs, device)
    padding = compile_fx.maybe_disable_comprehensive_padding(inputs)
    with V.set_fake_mode(fakes), DebugContext(), padding:
        compile_fx._recursive_post_grad_passes(module, is_inference=is_inference)
        graph = GraphLowering(module, example_inputs=inputs, is_inference=is_inference, is_backward=is_backward)
        graph.freeze_runtime_asserts()
        with V.set_graph_handler(graph), V.set_extern_kernel_nodes([]):
            graph.run(*inputs)
            code = graph.codegen()[0]
        # AOTAutograd needs the strides of a graph's outputs, because the backward uses saved tensors as they are.
        reported: Any = getattr(torch._guards.TracingContext.try_get(), "output_strides", None)
        for output in graph.graph_outputs if reported is not None else ():
            has_strides = getattr(output, "has_tensor_output", bool)()
            reported.append(tuple(map(int, output.get_stride())) if has_strides else None)
    return str(getattr(code, "value", code)), graph.constants


def _moved(module: Any, inputs: Sequence[Any], device: torch.device) -> list[Any]:
    """Return the inputs of a graph as if on a device, and change the graph's own tensors accordingly."""

    def moved(value: Any) -> Any:
        if isinstance(value, torch.device):
            return device
        return like(value, device) if isinstance(value, torch.Tensor) else value

    for node in module.graph.nodes:
        node.args = tuple(moved(value) for value in node.args)
        node.kwargs = {name: moved(value) for name, value in node.kwargs.items()}
        node.meta["val"] = pytree.tree_map(moved, node.meta.get("val"))
    return [moved(value) for value in inputs]


def cuda_device(hardware: Hardware) -> AbstractContextManager[None]:
    """Return a context that emulates a CUDA device for Inductor, and skips the text of kernels."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import scheduler
    from torch._inductor.codecache import CacheBase
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.runtime.hints import DeviceProperties
    from torch._subclasses import fake_tensor

    major, minor = hardware.compute_capability
    facts = {
        "multi_processor_count": hardware.num_processors,
        "major": major,
        "regs_per_multiprocessor": 65536,
        "max_threads_per_multi_processor": hardware.threads_per_processor,
        "max_threads_per_block": 1024,
        "warp_size": 32,
    }
    properties = types.SimpleNamespace(name="", minor=minor, total_memory=1 << 40, **facts)
    known = {name: value for name, value in facts.items() if name in DeviceProperties._fields}
    copied = DeviceProperties(type="cuda", index=0, cc=10 * major + minor, **known)

    def no_text(kernel: Any, name: str | None = None) -> str:
        kernel.inductor_meta, kernel.triton_meta = {}, {}
        return ""

    return replaced(
        (scheduler, "has_triton", lambda: True),
        (TritonKernel, "codegen_kernel", no_text),
        (DeviceProperties, "create", lambda device: copied),
        (CacheBase, "get_system", lambda: {"hash": ""}),
        (CudaInterface, "get_device_properties", lambda device=None: properties),
        (CudaInterface, "get_compute_capability", lambda device=None: 10 * major + minor),
        (torch.cuda, "get_device_properties", lambda device=None: properties),
        (torch.cuda, "get_device_capability", lambda device=None: (major, minor)),
        (torch.cuda, "current_device", lambda: 0),
        (fake_tensor, "init_gpu_context", lambda *args: None),
        # These look for a real device, which a build without CUDA does not have.
        (torch.Tensor, "copy_", lambda tensor, *args, **kwargs: aten.copy_(tensor, *args, **kwargs)),
        (torch.Tensor, "__invert__", lambda tensor: aten.bitwise_not(tensor)),
    )


# --- Inductor's Python, on planned tensors ---


def loaded(text: str, names: "Names") -> Callable[[list[Any]], Any]:
    """Return the function that calls the kernels, from a module that imports and compiles nothing."""

    def is_kept(node: ast.stmt) -> bool:
        targets = node.targets if isinstance(node, ast.Assign) else []
        is_call = any(isinstance(target, ast.Name) and target.id in ("runner", "call") for target in targets)
        return is_call or isinstance(node, ast.FunctionDef | ast.ClassDef)

    kept = [node for node in ast.parse(text).body if is_kept(node)]
    exec(compile(ast.Module(kept, []), "<inductor>", "exec"), names)
    call: Callable[[list[Any]], Any] = names["call"]
    return call


class Names(dict[str, Any]):
    """The globals of Inductor's Python. Unknown names are kernels, which do nothing."""

    def __init__(self, after_op: AfterOp, constants: Mapping[str, Any]) -> None:
        super().__init__(
            __name__="inductor", torch=_Torch(), aten=aten, device=torch.device, inf=float("inf"), nan=float("nan"),
            inductor_ops=torch.ops.inductor, extern_kernels=_Externs(after_op),
            reinterpret_tensor=lambda tensor, size, stride, offset: torch.as_strided(
                tensor, size, stride, tensor.storage_offset() + offset
            ),
            empty_strided=torch.empty_strided, empty_strided_cpu=_empty(CPU), empty_strided_cuda=_empty(CUDA),
        )  # fmt: skip
        self._constants = constants

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        if name in self._constants:
            return like(self._constants[name], self._constants[name].device)
        return _kernel


def _kernel(*args: Any, **kwargs: Any) -> None:
    """Stands for a kernel, or for a check of its inputs."""


_kernel.run = _kernel  # type: ignore[attr-defined]  # Triton kernels are called this way


def _empty(device: torch.device) -> Callable[..., torch.Tensor]:
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


def _run_and_save(op: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
    with _disable_current_modes():
        state = torch.zeros(RNG_STATE_BYTES, dtype=torch.uint8, device=CPU)  # on the host, even for a GPU
    return state, op(*args, **kwargs)


class _Ops:
    """torch.ops, with the ops replaced that save random states for recomputation."""

    higher_order = types.SimpleNamespace(
        run_and_save_rng_state=_run_and_save,
        run_with_rng_state=lambda state, op, *args, **kwargs: op(*args, **kwargs),
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.ops, name)


class _Torch:
    """torch, without a real CUDA device and with replaced higher-order ops."""

    cuda = types.SimpleNamespace(_DeviceGuard=lambda index: nullcontext(), set_device=lambda index: None)
    ops = _Ops()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Externs:
    """Library calls that write into an existing buffer. Each is reported to the ledger as the op it is."""

    def __init__(self, after_op: AfterOp) -> None:
        self._after_op = after_op

    def __getattr__(self, name: str) -> Any:
        packet = getattr(aten, name.removeprefix("bias_"))

        def call(*args: Any, out: Any = None, **kwargs: Any) -> Any:
            if out is None:
                return packet(*args, **kwargs)
            inner = [value._stepscope_inner if type(value) is PlannedTensor else value for value in args]
            self._after_op(packet.default, inner, kwargs, out._stepscope_inner)
            return out

        return call
