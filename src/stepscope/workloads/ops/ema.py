"""The complex exponential moving average of megalodon, in three equivalent ways.

Over D channels with N states each, θ = sigmoid(t)·2π/N, φ_k = k·θ, p = sigmoid(α),
q = (1 − sigmoid(α)·sigmoid(δ))·e^{iφ}, c = γ·√(1/N):

    h_t = q·h_{t−1} + p·x_t          y_t = Re Σ_k c_k·h_{t,k} + ω·x_t

The code carries u = h ÷ p instead of h: u_t = q·u_{t−1} + x_t and y_t = Re Σ w·u_t + ω·x_t with w = c·p. That
saves one multiplication per state and token. States enter and leave as h, real pairs [B, D, N, 2].
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepscope.workloads.custom_op import custom_op
from stepscope.workloads.ops.random_inputs import built_over
from stepscope.workloads.workload import HAS_TRITON, Built, Evidence, Proof, Workload, knob, ran

Path = Literal["fft", "sequential", "scan"]

CHUNK = 64  # tokens per matmul in the parallel scan; larger chunks cost more than they save

HAS_KERNELS = HAS_TRITON and torch.__version__ >= "2.7"
"""Whether the Triton kernels can run: they use tuples, which Triton 3.2 (torch 2.6) does not support."""

Pair = tuple[Tensor, Tensor]  # real and imaginary parts


class Coefficients(NamedTuple):
    decay: Tensor  # |q|, [D, N]
    angle: Tensor  # arg q, [D, N]
    drive: Tensor  # p, [D, N]
    weight: Tensor  # w = γ·√(1/N)·p as real pairs, [D, N, 2]
    skip: Tensor  # ω, [D]


class CEMA(nn.Module):
    """The moving average with its parameters; `module(x [B, L, D], state)` returns outputs and the last state."""

    def __init__(self, width: int, num_states: int, path: Path = "fft") -> None:
        super().__init__()
        self.path = path
        self.alpha = nn.Parameter(torch.randn(width, num_states) * 0.2)
        self.delta = nn.Parameter(torch.randn(width, num_states) * 0.2)
        # θ spans 1/width … 1 of its range on a logarithmic scale, so that channels cover all frequencies.
        share = torch.arange(1, width + 1) / (width + 1) * math.log(width + 1)
        self.theta = nn.Parameter(torch.logit(torch.exp(-share)))
        self.gamma = nn.Parameter(torch.randn(width, num_states, 2))
        self.omega = nn.Parameter(torch.randn(width) * 0.25)

    def coefficients(self, dtype: torch.dtype = torch.float64) -> Coefficients:
        """Return the constants of the recurrence.

        In float64, powers up to q^L keep their phase. The number of ops is small on purpose: on a GPU they take more
        host time than the fused kernels.
        """
        alpha, delta, theta = self.alpha.to(dtype), self.delta.to(dtype), self.theta.to(dtype)
        gamma, num_states = self.gamma.to(dtype), self.alpha.shape[1]
        drive = torch.sigmoid(alpha)
        wave = torch.arange(1, num_states + 1, device=theta.device, dtype=dtype)
        return Coefficients(
            decay=1 - drive * torch.sigmoid(delta),
            angle=(torch.sigmoid(theta) * (2 * math.pi / num_states))[:, None] * wave,
            drive=drive,
            weight=gamma * (drive * num_states**-0.5)[..., None],
            skip=self.omega.to(dtype),
        )

    def forward(
        self, x: Tensor, state: Tensor | None = None, last_state: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Return outputs [B, L, D] in x's dtype and, if requested, the last state [B, D, N, 2]."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(device_type=x.device.type, enabled=False):
            fused = self.path == "scan" and _is_fused(x)
            constants = self.coefficients(dtype if fused else torch.float64)
            drive = constants.drive.to(dtype)[..., None]
            carried = None if state is None else state.to(dtype) / drive
            y, last = _PATHS[self.path](x, constants, carried, last_state)
            return y.to(x.dtype), None if last is None else last * drive


def _fft(x: Tensor, c: Coefficients, state: Tensor | None, last_state: bool) -> tuple[Tensor, Tensor | None]:
    """Compute by convolution: y = irfft(rfft(x)·rfft(K)) with K_j = Re Σ w·q^j; states in closed form."""
    length = x.shape[1]
    values = x.to(torch.promote_types(x.dtype, torch.float32))
    size = 1 << (2 * length - 1).bit_length()
    signal = torch.fft.rfft(values.transpose(1, 2), n=size)
    kernel = torch.fft.rfft(_kernel(c, length).to(values.dtype), n=size)
    y = torch.fft.irfft(signal * kernel, n=size)[..., :length].transpose(1, 2)
    if state is not None:
        y = y + _response(c, state, length)
    return y, _last_state(values, c, state) if last_state else None


def _sequential(x: Tensor, c: Coefficients, state: Tensor | None, _: bool) -> tuple[Tensor, Tensor | None]:
    """Compute by definition: one token after another."""
    values = x.to(torch.promote_types(x.dtype, torch.float32))
    q = torch.polar(c.decay, c.angle).to(torch.promote_types(values.dtype, torch.complex64))
    weight = torch.stack((c.weight[..., 0], -c.weight[..., 1]), dim=-1).to(values.dtype)
    u = q.new_zeros(x.shape[0], *q.shape) if state is None else torch.view_as_complex(state.contiguous())
    outputs = []
    for x_t in values.unbind(1):
        u = torch.addcmul(x_t[..., None], q, u)
        outputs.append((torch.view_as_real(u) * weight).sum((-2, -1)))
    return torch.stack(outputs, dim=1) + values * c.skip.to(values.dtype), torch.view_as_real(u)


def _scan(x: Tensor, c: Coefficients, state: Tensor | None, _: bool) -> tuple[Tensor, Tensor | None]:
    """Compute in parallel: one Triton kernel on a GPU, matmuls over chunks of tokens elsewhere."""
    if _is_fused(x):
        y, last = ema_scan(x, torch.view_as_real(torch.polar(c.decay, c.angle)), c.weight, c.skip, state)
        return y, last
    values = x.to(torch.promote_types(x.dtype, torch.float32))
    rest = values.shape[1] % CHUNK
    whole = values.shape[1] - rest
    parts = []
    for part, chunk in ((values[:, :whole], CHUNK), (values[:, whole:], rest)):
        if part.shape[1]:
            y, state = _scan_chunks(part, c, state, chunk)
            parts.append(y)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), state


def _is_fused(x: Tensor) -> bool:
    return x.is_cuda and HAS_KERNELS


_PATHS = {"fft": _fft, "sequential": _sequential, "scan": _scan}


def _scan_chunks(x: Tensor, c: Coefficients, state: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:
    """Return outputs and last state for a multiple of the chunk length; states are kept at chunk borders only."""
    batch, length, width = x.shape
    num_chunks, dtype = length // chunk, x.dtype
    chunks = _chunks(x, chunk)
    re, im = _local_states(chunks, batch, c)
    first = (torch.zeros_like(re[:, :, :1]), torch.zeros_like(im[:, :, :1])) if state is None else _entering(state)
    re, im = torch.cat((first[0], re), dim=2), torch.cat((first[1], im), dim=2)
    # Hillis and Steele: after the pass with shift s, an entry is the sum of itself and its 2s − 1 predecessors.
    shift = 1
    while shift <= num_chunks:
        add_re, add_im = _times(_powers_first(c, chunk * shift, dtype), (re[:, :, :-shift], im[:, :, :-shift]))
        re = torch.cat((re[:, :, :shift], re[:, :, shift:] + add_re), dim=2)
        im = torch.cat((im[:, :, :shift], im[:, :, shift:] + add_im), dim=2)
        shift *= 2
    carried = torch.cat((re[:, :, :-1], im[:, :, :-1]), dim=-1).view(width, batch * num_chunks, -1)
    lag = torch.arange(chunk, device=x.device) - torch.arange(chunk, device=x.device)[:, None]
    toeplitz = (_kernel(c, chunk)[:, lag.clamp(min=0)] * (lag >= 0)).to(dtype)
    y = torch.baddbmm(torch.bmm(carried, _out_of_state(c, chunk).to(dtype)), chunks, toeplitz)
    return _join(y, batch), _leaving((re[:, :, -1:], im[:, :, -1:]))


def _powers(c: Coefficients, exponents: int | Tensor) -> Pair:
    """Return q^j for the exponents, [D, N, number of exponents], float64."""
    size, turn = torch.exp(c.decay.log()[..., None] * exponents), c.angle[..., None] * exponents
    return size * turn.cos(), size * turn.sin()


def _powers_first(c: Coefficients, exponents: int | Tensor, dtype: torch.dtype) -> Pair:
    """Return q^j for the exponents as [D, 1, number of exponents, N], to multiply states [D, B, chunks, N]."""
    re, im = _powers(c, exponents)
    return re.transpose(1, 2)[:, None].to(dtype), im.transpose(1, 2)[:, None].to(dtype)


def _weighted_powers(c: Coefficients, exponents: Tensor) -> Tensor:
    """Return the matrix [D, 2N, number of exponents] that maps the parts of u to Re w·q^j·u."""
    re, im = _times((c.weight[..., :1], c.weight[..., 1:]), _powers(c, exponents))
    return torch.cat((re, -im), dim=1)


def _times(a: Pair, b: Pair) -> Pair:
    return a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]


def _entering(state: Tensor) -> Pair:
    """Return real pairs [B, D, N, 2] as [D, B, 1, N]."""
    return state[..., 0].transpose(0, 1)[:, :, None], state[..., 1].transpose(0, 1)[:, :, None]


def _leaving(state: Pair) -> Tensor:
    """Return [D, B, 1, N] as real pairs [B, D, N, 2]: the inverse of `_entering`."""
    return torch.stack(state, dim=-1).squeeze(2).transpose(0, 1)


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """Return x [B, L, D] as [D, B·chunks, chunk]."""
    batch, length, width = x.shape
    return x.reshape(batch, length // chunk, chunk, width).permute(3, 0, 1, 2).reshape(width, -1, chunk)


def _join(y: Tensor, batch: int) -> Tensor:
    """Return [D, B·chunks, chunk] as [B, L, D]: the inverse of `_chunks`."""
    width, _, chunk = y.shape
    return y.view(width, batch, -1, chunk).permute(1, 2, 3, 0).reshape(batch, -1, width)


def _local_states(chunks: Tensor, batch: int, c: Coefficients) -> Pair:
    """Return Σ_j q^{chunk−1−j}·x_j, the state after each chunk if it began at zero: [D, B, chunks, N]."""
    width, _, chunk = chunks.shape
    into = torch.cat(_powers(c, chunk - 1 - torch.arange(chunk, device=chunks.device)), dim=1).transpose(1, 2)
    re, im = torch.bmm(chunks, into.to(chunks.dtype)).view(width, batch, -1, 2 * c.angle.shape[1]).chunk(2, dim=-1)
    return re, im


def _out_of_state(c: Coefficients, chunk: int) -> Tensor:
    """Return the matrix [D, 2N, chunk] for the state's share of a chunk's outputs, Re w·q^{j+1}·u."""
    return _weighted_powers(c, 1 + torch.arange(chunk, device=c.angle.device))


def _kernel(c: Coefficients, length: int) -> Tensor:
    """Return K_j = Re Σ w·q^j for j < length, plus ω at 0: [D, length] in float64, never [D, N, length].

    With j = a·CHUNK + b it is one matmul over N of w·q^{a·CHUNK} and q^b.
    """
    device = c.angle.device
    far = _weighted_powers(c, torch.arange(0, length, CHUNK, device=device)).transpose(1, 2)
    near = torch.cat(_powers(c, torch.arange(min(CHUNK, length), device=device)), dim=1)
    return torch.bmm(far, near).flatten(1)[:, :length] + functional.pad(c.skip[:, None], (0, length - 1))


def _response(c: Coefficients, state: Tensor, length: int) -> Tensor:
    """Return the incoming state's share of the outputs, Re Σ w·q^{t+1}·u: [B, L, D]."""
    batch, width, num_states, _ = state.shape
    starts = torch.arange(0, length, CHUNK, device=state.device)
    carried = torch.cat(_times(_powers_first(c, starts, state.dtype), _entering(state)), dim=-1)
    y = torch.bmm(carried.view(width, -1, 2 * num_states), _out_of_state(c, CHUNK).to(state.dtype))
    return _join(y, batch)[:, :length]


def _last_state(x: Tensor, c: Coefficients, state: Tensor | None) -> Tensor:
    """Return u after the last token, q^L·u + Σ_j x_{L−1−j}·q^j, as real pairs [B, D, N, 2]."""
    batch, length, _ = x.shape
    after = torch.arange(0, length, CHUNK, device=x.device).flip(0)
    whole = functional.pad(x, (0, 0, len(after) * CHUNK - length, 0))
    re, im = _times(_powers_first(c, after, x.dtype), _local_states(_chunks(whole, CHUNK), batch, c))
    re, im = re.sum(2, keepdim=True), im.sum(2, keepdim=True)
    if state is not None:
        kept_re, kept_im = _times(_powers_first(c, length, x.dtype), _entering(state))
        re, im = re + kept_re, im + kept_im
    return _leaving((re, im))


def _kernels() -> Any:
    from stepscope.workloads import ema_triton  # needs Triton, which only a GPU has

    return ema_triton


def _fake_gradients(grad_y: Tensor, grad_last: Tensor, x: Tensor, q: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    w, skip, _ = rest
    return x.new_empty(x.shape), *(q.new_empty(of.shape) for of in (q, w, skip, grad_last))


def _scan_gradients(ctx: Any, grad_y: Tensor, grad_last: Tensor) -> tuple[Tensor | None, ...]:
    *grads, grad_state = ema_scan_backward(grad_y, grad_last, *ctx.saved_tensors)
    return *grads, None if ctx.saved_tensors[-1] is None else grad_state


_INPUTS = "Tensor x, Tensor q, Tensor w, Tensor skip, Tensor? state"
ema_scan = custom_op(
    f"ema_scan({_INPUTS}) -> (Tensor, Tensor)",
    lambda *given: _kernels().forward(*given),
    lambda x, q, w, skip, state: (x.new_empty(x.shape), q.new_empty(x.shape[0], *q.shape)),
    _scan_gradients,
)
ema_scan_backward = custom_op(
    f"ema_scan_backward(Tensor grad_y, Tensor grad_last, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda *given: _kernels().backward(*given),
    _fake_gradients,
)


def proofs(knob: str, path: Path, seq_len: int, num_layers: int = 1) -> tuple[Proof, ...]:
    """Return the proof of a path: FFTs; a multiply-add per token; the scan's kernel, or its matmuls."""
    if path == "fft":
        return (ran(f"{knob}=fft", "aten::_fft_r2c", at_least=2 * num_layers),)

    def sequential(evidence: Evidence) -> str | None:
        calls = evidence.written("addcmul")
        return f"aten::addcmul ×{calls}" if calls >= max(1, seq_len * num_layers) else None

    def scan(evidence: Evidence) -> str | None:
        if evidence.device == "cuda" and HAS_KERNELS:
            launches = evidence.launches("stepscope_ema_forward")
            return f"stepscope_ema_forward ×{launches}" if launches >= max(1, num_layers) else None
        products = evidence.written("baddbmm")
        other = evidence.calls("_fft_") or sequential(evidence)
        return None if other or products < max(1, num_layers) else f"aten::baddbmm ×{products}, no FFT"

    return (Proof(claim=f"{knob}={path}", shows=sequential if path == "sequential" else scan),)


@dataclass(frozen=True, kw_only=True, slots=True)
class EmaConfig:
    """x [batch, seq_len, width] → outputs of that shape and the last state."""

    batch: int = knob(8, "sequences per batch")
    seq_len: int = knob(8192, "tokens per sequence; fft pads them to the next power of two from 2·seq_len")
    width: int = knob(1024, "channels, each with its own moving average")
    num_states: int = knob(16, "complex states per channel")
    path: Literal["fft", "sequential", "scan"] = knob(
        "fft", "fft: convolution with the kernel; sequential: a loop over tokens; scan: one Triton kernel on a GPU"
    )
    with_state: bool = knob(False, "pass an incoming state, as when a sequence is continued")
    last_state: bool = knob(True, "also return the last state: free for scan, extra work for fft")


class Ema(nn.Module):
    """Returns outputs and, if requested, the last state [batch, width, num_states, 2]."""

    def __init__(self, config: EmaConfig) -> None:
        super().__init__()
        self.last_state = config.last_state
        self.ema = CEMA(config.width, config.num_states, config.path)

    def forward(self, x: Tensor, state: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        y, last = self.ema(x, state, self.last_state)
        return (y, last) if self.last_state else y


def forward_flops(num_tokens: int, width: int, num_states: int) -> int:
    """Return the FLOPs of the recurrence: 7 multiply-adds per state and token, 1 per channel and token.

    q·h is 4, p·x is 1 and Re γ·h is 2; ω·x is the other.
    """
    return 2 * num_tokens * width * (7 * num_states + 1)


def build(config: EmaConfig) -> Built:
    shapes: dict[str, tuple[int, ...]] = {"x": (config.batch, config.seq_len, config.width)}
    if config.with_state:
        shapes["state"] = (config.batch, config.width, config.num_states, 2)
    flops = forward_flops(config.batch * config.seq_len, config.width, config.num_states)
    proved = proofs("path", config.path, config.seq_len)
    return built_over(Ema(config), config, shapes, *proved, forward_flops=flops)


SMALL = {"batch": 2, "seq_len": 96, "width": 16, "num_states": 4}

WORKLOAD = Workload(
    name="ema",
    about="megalodon's complex moving average: FFT, a loop over tokens, or a fused scan",
    config=EmaConfig,
    presets={"default": {}, "tiny": SMALL},
    build=build,
    reference={"path": "sequential"},
    gate={**SMALL, "seq_len": 200},
)
