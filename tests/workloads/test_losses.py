"""Three losses, one function: values, gradients, memory, compilers, and what a trace shows of each."""

from __future__ import annotations

import weakref

import pytest

torch = pytest.importorskip("torch")
from evidence import evidence_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from stepscope.workloads.ops import cross_entropy as losses
from stepscope.workloads.ops.cross_entropy import loss_proof, next_token_loss
from stepscope.workloads.workload import Built

ROWS, WIDTH, VOCAB = 50, 16, 97
# A CPU without bfloat16 units says so once, and multiplies all the same.
no_bf16_units = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


def inputs(dtype=torch.float64, rows=ROWS, width=WIDTH, vocab=VOCAB):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64).to(dtype)
    return hidden, weight, torch.randint(vocab, (rows,), generator=generator)


def loss_and_gradients(hidden, weight, targets, loss, chunk_rows, autocast=False):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        value = next_token_loss(hidden, weight, targets, loss, chunk_rows)
    (3 * value).backward()
    return value.detach(), hidden.grad, weight.grad


def by_hand(hidden, weight, targets):
    """The loss and 3 × its gradients, from the formula."""
    p = torch.exp(hidden @ weight.t())
    p = p / p.sum(dim=1, keepdim=True)
    rows = torch.arange(len(targets))
    value = -p[rows, targets].log().mean()
    p[rows, targets] -= 1
    return value, 3 * p @ weight / len(targets), 3 * p.t() @ hidden / len(targets)


@pytest.mark.parametrize("chunk_rows", [1, 7, 25, 50, 1000])
@pytest.mark.parametrize("loss", ["full", "chunked", "fused"])
def test_every_loss_is_the_formula_in_float64(loss, chunk_rows):
    for found, expected in zip(loss_and_gradients(*inputs(), loss, chunk_rows), by_hand(*inputs()), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("loss", ["chunked", "fused"])
def test_gradients_are_those_of_finite_differences(loss):
    hidden, weight, targets = inputs(rows=5, width=3, vocab=7)
    hidden.requires_grad_()
    weight.requires_grad_()

    assert torch.autograd.gradcheck(lambda h, w: next_token_loss(h, w, targets, loss, 2), (hidden, weight))


@pytest.mark.parametrize("loss", ["chunked", "fused"])
def test_a_second_derivative_is_refused_rather_than_wrong(loss):
    hidden, weight, targets = inputs()
    hidden.requires_grad_()
    weight.requires_grad_()
    (grad,) = torch.autograd.grad(next_token_loss(hidden, weight, targets, loss, 7), hidden, create_graph=True)

    with pytest.raises(RuntimeError, match=r"no second derivative|no autograd formula"):
        grad.sum().backward()


@no_bf16_units
@pytest.mark.parametrize("loss", ["chunked", "fused"])
@pytest.mark.parametrize(("dtype", "autocast"), [("float32", False), ("bfloat16", False), ("float32", True)])
def test_narrow_losses_are_as_near_the_truth_as_the_full_one(loss, dtype, autocast):
    narrow = inputs(getattr(torch, dtype), rows=512)
    truth = by_hand(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in narrow))
    found = loss_and_gradients(*narrow, loss, 4, autocast)
    full = loss_and_gradients(*narrow, "full", 4, autocast)

    for value, plain, true in zip(found, full, truth, strict=True):
        # 128 chunks: a weight gradient added up in bfloat16 would be ten times further off.
        assert (value - true).norm() <= 1.5 * (plain - true).norm() + 1e-6 * true.norm()
    assert [t.dtype for t in found] == [torch.float32, narrow[0].dtype, narrow[1].dtype]


@no_bf16_units
@pytest.mark.parametrize("loss", ["chunked", "fused"])
def test_a_sure_prediction_keeps_its_gradient_in_bfloat16(loss):
    # Two words, a difference of 7 between their logits: p = 0.9991, which bfloat16 rounds to 1.
    hidden = torch.tensor([[7.0]], dtype=torch.bfloat16)
    weight = torch.tensor([[1.0], [0.0]], dtype=torch.bfloat16)
    targets = torch.tensor([0])
    _, grad_hidden, grad_weight = loss_and_gradients(hidden, weight, targets, loss, 1)

    expected = -3 / (1 + torch.exp(torch.tensor(7.0)))
    torch.testing.assert_close(grad_hidden.float(), expected.view(1, 1), rtol=0.01, atol=0)
    torch.testing.assert_close(grad_weight[0].float(), 7 * expected.view(1), rtol=0.01, atol=0)


@pytest.mark.parametrize("loss", ["chunked", "fused"])
@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_side_has_no_gradient_and_the_other_has_its_own(loss, frozen):
    hidden, weight, targets = inputs()
    leaf = weight if frozen == "hidden" else hidden
    leaf.requires_grad_()
    next_token_loss(hidden, weight, targets, loss, 7).backward()

    expected = loss_and_gradients(*inputs(), "full", 7)[2 if frozen == "hidden" else 1] / 3
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("loss", "forward", "both"), [("full", 1, 3), ("chunked", 1, 4), ("fused", 3, 3)])
def test_products_are_counted(loss, forward, both):
    hidden, weight, targets = inputs()
    hidden.requires_grad_()
    weight.requires_grad_()
    product = 2 * ROWS * WIDTH * VOCAB

    with FlopCounterMode(display=False) as counter:
        value = next_token_loss(hidden, weight, targets, loss, 7)
    assert counter.get_total_flops() == forward * product
    with counter:
        value = next_token_loss(hidden, weight, targets, loss, 7)
        value.backward()
    assert counter.get_total_flops() == both * product
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        next_token_loss(hidden, weight, targets, loss, 7)
    assert counter.get_total_flops() == product


class Alive(TorchDispatchMode):
    """The most bytes of tensors made inside that were alive at once."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.seen:
                storage = tensor.untyped_storage()
                self.seen.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.died, storage._cdata, storage.nbytes())
        return out

    def died(self, key, num_bytes):
        self.seen.discard(key)
        self.now -= num_bytes


@pytest.mark.parametrize(
    ("dtype", "num_chunks_alive"), [("float32", 2), pytest.param("bfloat16", 5, marks=no_bf16_units)]
)
def test_one_chunk_of_logits_is_alive_at_a_time(dtype, num_chunks_alive):
    # The custom op hides what is inside it from a dispatch mode, so the function itself is watched.
    hidden, weight, targets = inputs(getattr(torch, dtype), rows=512, width=4, vocab=1000)
    with Alive() as alive:
        losses._loss_and_gradients(hidden, weight, targets, 16, hidden.dtype)

    # float32: logits and log-probabilities; bfloat16: logits (1), their float32 copy (2), log-probabilities (2).
    chunk = 16 * 1000 * hidden.element_size()
    gradients = 512 * 4 * hidden.element_size() + 2 * 1000 * 4 * 4
    assert chunk * num_chunks_alive <= alive.peak <= chunk * (num_chunks_alive + 0.25) + gradients


def test_fused_removes_most_of_the_memory_of_full():
    hidden, weight, targets = inputs(torch.float32, rows=512, width=4, vocab=1000)
    with Alive() as full:
        loss_and_gradients(hidden, weight, targets, "full", 16)
    with Alive() as fused:
        losses._loss_and_gradients(hidden, weight, targets, 16, torch.float32)

    assert full.peak >= 3 * 512 * 1000 * 4
    assert fused.peak < 0.1 * full.peak


@pytest.mark.long
@pytest.mark.parametrize("loss", ["full", "chunked", "fused"])
@pytest.mark.parametrize("autocast", [False, pytest.param(True, marks=no_bf16_units)])
def test_a_compiler_takes_it_whole(loss, autocast):
    torch._dynamo.reset()
    hidden, weight, targets = inputs(torch.float32)

    def twice(h, w):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return next_token_loss(2 * h, w, targets, loss, 7)

    results = []
    for function in (twice, torch.compile(twice, backend="aot_eager", fullgraph=True)):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        value = function(h, w)
        value.backward()
        results.append((value.detach(), h.grad, w.grad))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_compilation", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_ops_keep_the_rules_of_custom_ops(with_compilation):
    hidden, weight, targets = inputs(torch.float32, rows=6, width=4, vocab=9)
    hidden.requires_grad_()
    weight.requires_grad_()
    checks = ("test_schema", "test_faketensor")

    arguments = (hidden, weight, targets, 4, torch.float32)
    every = (*checks, "test_autograd_registration")
    torch.library.opcheck(losses._chunked, arguments, **({} if with_compilation else {"test_utils": every}))
    torch.library.opcheck(losses._chunked_gradients, arguments, test_utils=checks)
    torch.library.opcheck(losses._fused, (*arguments, True), test_utils=checks)
    torch.library.opcheck(losses._fused, (*arguments, False), test_utils=checks)


class Head(torch.nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.loss = loss
        self.weight = torch.nn.Parameter(torch.randn(VOCAB, WIDTH))

    def forward(self, hidden, targets):
        return next_token_loss(hidden, self.weight, targets, self.loss, 7)


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("ran", ["full", "chunked", "fused"])
@pytest.mark.parametrize("claimed", ["full", "chunked", "fused"])
def test_a_trace_proves_the_loss_that_ran_and_no_other(claimed, ran, backward):
    hidden, _, targets = inputs(torch.float32)
    built = Built(module=Head(ran), batch=lambda: {"hidden": hidden, "targets": targets})
    shown = loss_proof(f"loss={claimed}", claimed).shows(evidence_of(built, backward=backward))

    assert (shown is not None) == (claimed == ran), shown
