"""What autocast does with an op, as torch answers: against the documented lists, and without running the op."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode

from stepscope.recorder.precision import autocast_policy as policy

# From torch.amp's documentation, CPU: ops of which every version since 2.4 says the same.
CPU = {
    policy.LOW: "mm bmm addmm matmul linear conv1d conv2d conv3d baddbmm addbmm scaled_dot_product_attention",
    policy.FLOAT32: "mse_loss nll_loss cross_entropy_loss l1_loss kl_div cdist prod trace avg_pool3d fft_fft "
    "linalg_inv binary_cross_entropy smooth_l1_loss huber_loss",
    policy.WIDEST: "cat stack index_copy",
    policy.UNLISTED: "relu layer_norm softmax add mul embedding gelu exp sum",
}
EXPECTED = [(name, answer) for answer, names in CPU.items() for name in names.split()]


@pytest.mark.parametrize(("name", "answer"), EXPECTED)
def test_the_documented_lists_of_the_cpu(name, answer):
    assert policy.policy("cpu", name, torch.bfloat16) == answer
    assert policy.policy("cpu", name, torch.float16) == answer


@pytest.mark.filterwarnings("ignore")
def test_every_listed_op_answers():
    # The name of a dimension, which older versions of torch take, cannot be made up.
    names = [name for name in policy._listed("cpu") if "dimname" not in name.lower()]
    answers = [policy._tested(name, "cpu", torch.bfloat16) for name in names]

    assert len(answers) > 100 and policy.OTHER not in answers


class Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ran = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ran.append(func.name())
        return func(*args, **(kwargs or {}))


def test_the_op_itself_is_never_run():
    policy._tested.cache_clear()

    with Watch() as watch:
        assert policy.policy("cpu", "bmm", torch.bfloat16) == policy.LOW
    assert "aten::bmm" not in watch.ran and "aten::_to_copy" in watch.ran
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("names", "listed"),
    [
        (["nll_loss_forward"], "nll_loss"),
        (["_log_softmax", "cross_entropy"], "cross_entropy_loss"),
        (["_scaled_dot_product_flash_attention_for_cpu"], "scaled_dot_product_attention"),
        (["add", "__add__"], None),
        (["convolution", "conv2d"], "conv2d"),
    ],
)
def test_what_ops_are_made_of_is_known_by_their_name(names, listed):
    assert policy.listed_name("cpu", names) == listed


def test_a_device_without_autocast_lists_nothing():
    assert policy.policy("meta", "mm", torch.bfloat16) is None
