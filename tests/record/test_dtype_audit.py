"""The dtype audit on small models whose dtypes, casts and reasons are known."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.nn import functional

import stepscope
from stepscope.errors import UsageError
from stepscope.recorder.precision import dtype_audit

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul", "ignore:Mismatch dtype")
EXAMPLE = Path(__file__).parents[2] / "examples" / "toy_precision.py"


def toy():
    spec = importlib.util.spec_from_file_location("toy_precision", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build()


def gives(audit):
    return {row["name"]: row["outputs"] for row in audit.facts["modules"]}


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_the_toy_model_under_the_cpus_autocast(low):
    model, batch = toy()
    x, targets = batch().values()
    audit = stepscope.audit(model, x, autocast=low, loss=lambda logits: functional.cross_entropy(logits, targets))
    name = str(low).removeprefix("torch.")

    # Unlike CUDA's, the CPU's autocast leaves layer_norm alone; cross_entropy_loss is on its float32 list.
    assert audit.facts["parameters"] == {"float32": (20 * 10 + 2 * 10 + 10 * 5) * 4}
    assert gives(audit) == {"": [name], "fc1": [name], "relu": [name], "ln": [name], "fc2": [name]}
    assert (audit.facts["logits"], audit.facts["loss"]) == (name, "float32")
    assert [row["dtype"] for row in audit.facts["gradients"]] == ["float32"]
    assert [row["dtype"] for row in audit.facts["optimizer_state"]] == ["float32"]
    assert {one.detail for one in audit.stayed} == {"cross_entropy_loss", "nll_loss"}
    assert {one.reason for one in audit.stayed} == {dtype_audit.FP32_LIST}
    assert audit.facts["error"] is None


def test_casts_of_weights_are_half_of_their_bytes_and_repeated_in_each_micro_batch():
    model, batch = toy()
    once, thrice = (
        stepscope.audit(model, named_inputs=batch(), autocast=torch.bfloat16, micro_batches=number)
        for number in (1, 3)
    )

    weights = once.weight_casts
    assert (weights.num_parameters, weights.num_casts, weights.num_uses) == (2, 2, 2)
    assert weights.parameter_bytes == (20 * 10 + 10 * 5) * 4 == 2 * weights.cast_bytes
    assert (weights.num_repeated, weights.repeated_bytes) == (0, 0)

    assert thrice.weight_casts.cast_bytes == weights.cast_bytes
    assert thrice.weight_casts.num_repeated == 4
    assert thrice.weight_casts.repeated_bytes == 2 * (weights.parameter_bytes + weights.cast_bytes)
    (cast,) = [one for one in thrice.casts if one.of == "weight"]
    assert cast.num_by_micro_batch == (2, 2, 2) and cast.modules == ("fc1", "fc2")
    assert cast.callers == ("toy_precision.py:25 forward", "toy_precision.py:27 forward")
    # The gradients of both come back as float32.
    assert once.cast_bytes(phase="backward", of="gradient") == 3 * weights.cast_bytes + 3 * 2 * 8 * 5


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return self.two(self.one(self.one(x))) + self.two(x)


def test_a_weight_that_is_used_twice_is_cast_once_an_activation_each_time():
    audit = stepscope.audit(Twice(), torch.randn(4, 8), autocast=torch.bfloat16)

    assert (audit.weight_casts.num_casts, audit.weight_casts.num_uses) == (2, 4)
    (activation,) = [one for one in audit.casts if one.of == "activation"]
    assert (activation.num_casts, activation.num_again) == (2, 1)
    assert activation.again_bytes == 4 * 8 * (4 + 2)
    shown = " ".join(str(audit).split())
    assert "1 cast in forward repeats an earlier cast: 192 B moved again per step" in shown


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class Returns(nn.Module):
    """Gives its loss and its logits in one of the ways that models do."""

    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind = nn.Linear(8, 8), kind

    def forward(self, x):
        logits = self.linear(x)
        return self.kind(loss=logits.float().square().mean(), logits=logits)


@pytest.mark.parametrize(
    "kind", [dict, Output, lambda loss, logits: (loss, [logits])], ids=["dict", "dataclass", "tuple"]
)
def test_logits_beside_a_loss_are_found_in_whatever_a_model_returns(kind):
    audit = stepscope.audit(Returns(kind), torch.randn(4, 8), autocast=torch.bfloat16)

    assert (audit.facts["logits"], audit.facts["loss"]) == ("bfloat16", "float32")
    assert gives(audit)[""] == ["float32", "bfloat16"]
    # The audit itself calls the backward: that is no line of the model's.
    assert {one.callers for one in audit.casts if one.phase == "backward"} == {()}


class Careful(nn.Module):
    """Casts by hand, and switches autocast off for a part."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, x):
        low = self.linear(x)
        wide = low.float().exp()
        with torch.autocast("cpu", enabled=False):
            off = functional.linear(wide, self.linear.weight)
        return torch.cat([off, low]) + (low * self.scale).sum()


def test_every_reason_for_float32():
    audit = stepscope.audit(Careful(), torch.randn(4, 8), autocast=torch.bfloat16)
    reasons = {one.reason: one for one in audit.stayed}

    assert reasons[dtype_audit.AUTOCAST_OFF].ops == ("mm",)
    assert (reasons[dtype_audit.PROMOTE_LIST].ops, reasons[dtype_audit.PROMOTE_LIST].detail) == (("cat",), "cat")
    assert reasons[dtype_audit.PROMOTION].ops == ("mul",)
    exp = next(one for one in audit.stayed if "exp" in one.ops)
    assert exp.reason == dtype_audit.INPUTS and exp.detail.startswith("a cast at test_dtype_audit.py:")
    explicit = [one for one in audit.casts if one.by == "code"]
    assert [(one.source, one.target, one.function) for one in explicit] == [("bfloat16", "float32", "float")]
    by_autocast = {(one.function, one.of) for one in audit.casts if one.by == "autocast"}
    assert by_autocast == {("linear", "weight"), ("linear", "activation"), ("cat", "activation")}


def test_without_a_lower_dtype_there_is_nothing_to_explain():
    model, batch = toy()
    audit = stepscope.audit(model, named_inputs=batch())

    assert audit.stayed == [] and audit.casts == [] and audit.cast_bytes() == 0
    assert audit.facts["logits"] is None and audit.facts["loss"] == "float32"
    assert str(audit).startswith("No casts")


def test_bf16_weights_need_no_autocast():
    model, batch = toy()
    model.bfloat16()
    audit = stepscope.audit(model, batch()["x"].bfloat16(), loss=lambda logits: logits.float().square().mean())

    assert gives(audit)["ln"] == ["bfloat16"] and audit.facts["parameters"] == {"bfloat16": 540}
    assert [row["dtype"] for row in audit.facts["gradients"]] == ["bfloat16"]
    assert {row["dtype"] for row in audit.facts["optimizer_state"]} == {"bfloat16", "float32"}  # its step count
    (stayed,) = audit.stayed
    assert stayed.reason == dtype_audit.INPUTS and stayed.ops == ("pow", "mean")


def test_a_norm_with_a_weight_of_another_dtype_is_told(monkeypatch):
    model = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8))
    audit = stepscope.audit(model, torch.randn(4, 8), autocast=torch.bfloat16)
    (norm,) = audit.facts["norms"]
    assert (norm["function"], norm["input"], norm["weight"]) == ("rms_norm", "bfloat16", "float32")
    assert (norm["is_fused"], norm["loses_fused"], norm["module"]) == (False, False, "1")  # a CPU has no fused one
    assert "no fused kernel is lost" in str(audit)

    monkeypatch.setattr(dtype_audit, "_has_fused", lambda *_: True)
    lost = stepscope.audit(model, torch.randn(4, 8), autocast=torch.bfloat16)
    assert "loses the fused kernel and runs as pow, mean" in " ".join(str(lost).split())

    model[1].bfloat16()
    assert not stepscope.audit(model, torch.randn(4, 8), autocast=torch.bfloat16).facts["norms"]


def test_a_checkpointed_block_casts_its_weights_again_in_the_backward():
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8, bias=False)

        def forward(self, x):
            return checkpoint(self.linear, x, use_reentrant=False)

    audit = stepscope.audit(Block(), torch.randn(4, 8, requires_grad=True), autocast=torch.bfloat16)
    casts = [(one.phase, one.num_casts) for one in audit.casts if one.of == "weight" and one.by == "autocast"]
    assert sorted(casts) == [("backward", 1), ("forward", 1)]


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model(torch.randn(3, 4)).sum().backward()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = [parameter.grad for parameter in model.parameters()]
    state = torch.random.get_rng_state()

    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    stepscope.audit(model, x, autocast=torch.bfloat16, micro_batches=2)

    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(a is b for a, b in zip(gradients, [parameter.grad for parameter in model.parameters()]))
    assert torch.equal(state, torch.random.get_rng_state())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"module": torch.relu}, "a torch.nn.Module"),
        ({"module": nn.Identity(), "autocast": torch.float32}, "torch.bfloat16, torch.float16"),
        ({"module": nn.Identity(), "micro_batches": 0}, "1 or more"),
        ({"module": nn.Identity()}, "needs no gradient"),
    ],
)
def test_what_cannot_be_audited_is_one_line(arguments, said):
    with pytest.raises(UsageError, match=said):
        stepscope.audit(arguments.pop("module"), torch.ones(2, 2), **arguments)


def test_an_error_of_the_model_is_the_users_own():
    with pytest.raises(RuntimeError, match="shapes"):
        stepscope.audit(nn.Linear(3, 3), torch.ones(2, 2))
