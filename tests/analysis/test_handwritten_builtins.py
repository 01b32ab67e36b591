"""Only the calls of a built-in's handwritten form, in order, are that built-in."""

from __future__ import annotations

import json

import polars as pl
import pytest

from stepscope.analysis.kernels.handwritten_builtins import handwritten_builtin

FULL, ROWS, LAST = [512, 64], [512, 1], [64]
OPERANDS = {
    "number": [FULL, []],
    "same": [FULL, FULL],
    "rows": [FULL, ROWS],
    "last": [LAST, FULL],
    "columns": [FULL, [1, 64]],
}


def run(calls: str, **made: str) -> pl.DataFrame:
    """Work of calls such as `mul:rows pow:2`; `made` has the ops that a call is made of, by its name."""
    rows = []
    for number, call in enumerate(calls.split()):
        name, _, kind = call.partition(":")
        shapes = OPERANDS.get(kind, [FULL, []])
        inputs = ["", "", kind] if name == "var" else ["", kind if kind not in OPERANDS else ""]
        for op in made.get(name, name).split():
            at = len(rows)
            texts = (f"aten::{name}", f"aten::{op}", json.dumps(shapes), json.dumps(inputs))
            rows.append((at, at, number, *texts))
    columns = ["event", "start_ns", "root", "root_op", "op", "shapes", "inputs"]
    return pl.DataFrame(rows, schema=columns, orient="row")


def builtin(calls: str, **made: str) -> str | None:
    found = handwritten_builtin(run(calls, **made))
    return found[0] if found else None


TANH_GELU, GELU = 'F.gelu(x, approximate="tanh")', "F.gelu(x)"
LAYER_NORM, RMS_NORM = "F.layer_norm(x, (size,), weight, bias, eps)", "F.rms_norm(x, (size,), weight, eps)"


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ("mul:number pow:3 mul:number add:same mul:number tanh add:number mul:same", TANH_GELU),
        ("mul:number pow:3. to mul:number add:same mul:number tanh add:number mul:same", TANH_GELU),
        ("mul:same mul:same mul:number add:same mul:number tanh add:number mul:same mul:number", TANH_GELU),
        ("mul:number mul:number mul:number mul:same add:number mul:same tanh add:number mul:same", TANH_GELU),
        ("mul:number div:number erf add:number mul:same", GELU),
        ("div:number erf add:number mul:same mul:number", GELU),
        ("mean sub:rows pow:2 mean add:number rsqrt mul:rows mul:last add:last", LAYER_NORM),
        ("mean sub:rows square mean sub:rows add:number sqrt div:rows mul:last add:last", LAYER_NORM),
        ("mean var:False sub:rows add:number sqrt div:rows", "F.layer_norm(x, (size,), eps=eps)"),
        ("pow:2 mean add:number rsqrt mul:rows to mul:last", RMS_NORM),
        ("mul:same mean add:number sqrt div:rows", "F.rms_norm(x, (size,), eps=eps)"),
        ("amax sub:rows exp sum div:rows", "torch.softmax(x, -1)"),
        ("max sub_:rows exp_ sum div_:rows", "torch.softmax(x, -1)"),
    ],
)
def test_a_handwritten_form_is_the_built_in(calls, expected):
    assert builtin(calls) == expected
    assert builtin(f"linear {calls} dropout") == expected, "what comes before and after"


@pytest.mark.parametrize(
    "calls",
    [
        "sigmoid mul:same sigmoid tanh mul:same add:same sigmoid tanh mul:same",  # an LSTM cell
        "sigmoid mul:same",  # a gate, perhaps of another tensor
        "amax sub:rows exp sum log add:same",  # logsumexp
        "amax sub:number exp sum div:number",  # over all elements
        "amax sub:columns exp sum div:columns",  # over another dimension
        "max sub:rows exp sum relu div:rows",
        "pow:2 mean",  # a mean squared error
        "pow:2 sum add:number sqrt div:rows",  # an L2 norm
        "pow:3 mean add:number rsqrt mul:rows",
        "mean sub:columns pow:2 mean add:number rsqrt mul:columns",  # a batch norm
        "mean var:True sub:rows add:number sqrt div:rows",  # var / (n - 1)
        "mul:number pow:2 mul:number add:same mul:number tanh add:number mul:same",
        "div:number erf add:number mul:number",  # a normal distribution's CDF
    ],
)
def test_other_functions_are_not(calls):
    assert builtin(calls) is None


def test_what_one_call_of_the_library_is_made_of_is_not_handwritten():
    made = "amax sub exp sum div"

    assert builtin(made.replace("sub", "sub:rows").replace("div", "div:rows")) == "torch.softmax(x, -1)"
    assert handwritten_builtin(run("my_softmax:rows", my_softmax=made)) is None


def test_ops_of_a_call_count_as_the_call():
    """On a CPU, a mean is a sum and a division, and a power checks its exponent."""
    work = run("pow:2 mean add:number rsqrt mul:rows", mean="sum fill_ div_", pow="pow to")

    assert handwritten_builtin(work) == (
        "F.rms_norm(x, (size,), eps=eps)", ["pow", "mean", "add", "rsqrt", "mul"]
    )  # fmt: skip


def test_without_shapes_or_exponents_nothing_is_recognized():
    work = run("pow:2 mean add:number rsqrt mul:rows")

    assert handwritten_builtin(work) is not None
    for column in ("shapes", "inputs"):
        unknown = work.with_columns(pl.lit(None, pl.String).alias(column))
        assert handwritten_builtin(unknown) is None
