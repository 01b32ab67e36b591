"""A back end that torch refuses is a skipped row with torch's words; attention's bytes are those of the formula."""

from __future__ import annotations

import subprocess
import warnings

import pytest
from sweep_runs import bench_words, quiet_environment, rows_in

from stepscope.sweep.process import recorded_warnings, refusal

torch = pytest.importorskip("torch")
from stepscope.workloads.ops import attention

FREE = {"sdpa": "free", "device": "cuda"}
SAID = ["Flash attention kernel not used because:", "Expected query, key and value to all be of dtype: {Half}."]


def test_what_is_warned_of_is_heard_and_still_shown():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        before = warnings.showwarning
        with recorded_warnings() as said:
            warnings.warn("why not", stacklevel=1)
        assert warnings.showwarning is before

    assert said == ["why not"]
    assert [str(warning.message) for warning in shown] == ["why not"]


def test_the_reason_is_torchs_own():
    error = RuntimeError("SDPA back end 'flash' cannot run torch.float32: No available kernel. Aborting execution.")
    reason, torch_reasons = refusal(error, SAID, FREE, {"implementation": "flash"})

    assert torch_reasons == [SAID[1]]
    assert reason == f"implementation=flash: PyTorch refused it: {SAID[1]}"


@pytest.mark.parametrize(
    ("error", "run", "config"),
    [
        (RuntimeError("something else"), {"sdpa": "flash", "device": "cuda"}, {}),
        (RuntimeError("No available kernel."), FREE, {}),
        (RuntimeError("No available kernel."), FREE, {"implementation": "naive"}),
    ],
)
def test_other_errors_are_no_refusals(error, run, config):
    assert refusal(error, [], run, config) is None


def test_a_refusal_without_words_says_that_too():
    found = refusal(RuntimeError("No available kernel."), [], {"sdpa": "cudnn", "device": "cuda"}, {})

    assert found == ("sdpa=cudnn: PyTorch refused it without a reason", [])


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 products says so
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("implementation", ["naive", "builtin", "flash", "math"])
def test_held_bytes_are_what_autograd_keeps(implementation, causal, dtype):
    sizes = {"seq_len": 64, "batch": 2, "heads": 2, "head_width": 16}
    config = attention.WORKLOAD.configure(implementation=implementation, causal=causal, **sizes)
    built = attention.build(config)
    batch = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in built.batch().items()}
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = built.module(**batch)
    for tensor in (*batch.values(), out):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    held = attention.held_bytes(config, dtype.itemsize)

    assert sum(kept.values()) + held["output_gradient"] == sum(held.values())


@pytest.mark.long
def test_a_grid_measures_what_it_predicts_and_refuses_with_a_reason(tmp_path):
    words = ["attention", "--preset", "tiny", "--set", "implementation=flash,efficient", "--set", "seq_len=64"]
    words += ["--mode", "forward+backward", "--device", "cpu", "--steps", "3", "-o", tmp_path / "out"]
    done = subprocess.run(bench_words(*words), capture_output=True, text=True, env=quiet_environment(), timeout=120)

    flash, efficient = rows_in(tmp_path / "out")
    assert flash["status"] == "ok", done.stderr
    assert flash["facts"]["theory_bytes"] == flash["before_backward_bytes"]
    assert flash["facts"]["tensor_logsumexp_bytes"] == 4 * 2 * 64
    assert flash["facts"]["forward_ms"] > 0 < flash["facts"]["backward_ms"]
    assert (efficient["status"], efficient["refused"]) == ("skipped", [])
    assert efficient["reason"] == "implementation=efficient: PyTorch has no such kernel for CPUs"
    assert "theory_bytes" in (tmp_path / "out" / "results.csv").read_text()
