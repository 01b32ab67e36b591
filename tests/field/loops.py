"""Plain loops: every way to update, what happens between steps, and who trains. Torch is all they need."""

from __future__ import annotations

from case import Case

TORCHRUN = ("--standalone", "--nproc-per-node", "2")

UPDATES = (
    Case("updates/plain", 40, 8, absent=("evaluation", "checkpoint", "rollout"), in_make_test=True),
    Case(
        "updates/graphs", 40, 7.2, per_step_may_miss_share=0.02, between=("evaluation",), period=5, in_make_test=True
    ),
    Case("updates/letters", 40, 1, in_make_test=True),
    Case("updates/detector", 40, 5),
    Case("updates/hand_data_add", 40, 28, unit="tokens", in_make_test=True),
    Case("updates/hand_no_grad", 40, 12, between=("evaluation",), period=20, in_make_test=True),
    Case("updates/hand_assign", 40, 30, unit="tokens"),
    Case("updates/hand_tensors", 40, None, micro_batches=None),
    Case("updates/hand_scheduled", 40, 16, micro_batches=2),
    Case("updates/functional", 40, 10, in_make_test=True),
    Case("updates/functional_lists", 40, 24, unit="tokens", in_make_test=True),
    Case("updates/own_optimizer", 40, 6, in_make_test=True),
    Case("updates/engine", 40, 10, micro_batches=2, in_make_test=True),
    Case("updates/lbfgs", 40, 20, micro_batches=None),
    Case("updates/gan", 40, 16, micro_batches=None, updates_per_step=2, in_make_test=True),
    Case("updates/gan_pictures", 40, 16, micro_batches=None, updates_per_step=2, period=4),
    Case("updates/gan_info", 40, 8, micro_batches=None, updates_per_step=3),
    Case("updates/critic_fed", 40, 40, micro_batches=None, updates_per_step=6),
    Case("updates/critic", 40, None, micro_batches=None, updates_per_step=6),
    Case("updates/accumulation", 40, 128, unit="tokens", micro_batches=4, in_make_test=True),
    Case("updates/scaler", 40, 8, period=10, in_make_test=True),
    Case("updates/two_optimizers", 40, 32, unit="tokens", updates_per_step=2, in_make_test=True),
    Case("updates/in_backward", 40, 8, updates_per_step=4, in_make_test=True),
    Case("updates/average", 40, 8, absent=("evaluation", "rollout")),
    Case("updates/adversarial", 40, 8, micro_batches=None),
    Case("updates/meta", 40, 40, micro_batches=None),
    Case("updates/post_hook", 40, 8, in_make_test=True),
    Case("updates/new_optimizer", 40, 8, period=10),
    Case("updates/in_turn", 60, 8, period=2),
    Case("updates/hand_foreach", 40, 12),
    Case("updates/folds", 60, 8, between=("evaluation",), period=12, in_make_test=True),
    Case("updates/gan_folds", 40, 16, micro_batches=None, updates_per_step=2, period=20),
    Case("updates/script_class", 40, 8, in_make_test=True),
    Case("updates/short", 3, 8, exit_code=3, in_make_test=True),
)

BETWEEN = (
    Case("between/evaluation_first", 60, 64, unit="tokens", between=("evaluation",), period=20, in_make_test=True),
    Case(
        "between/evaluation_every_5",
        60,
        8,
        between=("evaluation",),
        seconds_between={"evaluation": 11 * 0.02},
        step_ms_at_least=4.0,
        period=5,
        in_make_test=True,
    ),
    Case("between/evaluation_with_grad", 60, 8, between=("evaluation",), period=10),
    Case(
        "between/checkpoint_every_5",
        60,
        8,
        between=("checkpoint",),
        absent=("evaluation",),
        period=5,
        in_make_test=True,
    ),
    Case("between/average_evaluated", 60, 8, between=("evaluation",), period=10, in_make_test=True),
    Case("between/wrapper_samples", 60, 136, "tokens", between=("evaluation",), period=10, in_make_test=True),
    Case(
        "between/printed_samples",
        60,
        128,
        "tokens",
        between=("evaluation",),
        absent=("rollout",),
        period=10,
    ),
    Case("between/rollout_no_grad", 40, 48, between=("rollout",), in_make_test=True),
    Case("between/rollout_greedy", 80, 12, between=("rollout",), absent=("evaluation",), period=4),
    Case(
        "between/evaluation_named",
        60,
        12,
        micro_batches=None,
        between=("evaluation",),
        absent=("rollout",),
        seconds_between={"evaluation": 0.5},
        period=10,
    ),
    Case("between/targets_no_grad", 40, 12, micro_batches=None, absent=("evaluation", "rollout"), in_make_test=True),
    Case("between/timed_wrapper", 40, 20, micro_batches=None, absent=("evaluation", "rollout")),
    Case("between/rollout_with_grad", 40, 12, micro_batches=None),
    Case(
        "between/ppo",
        80,
        16,
        between=("rollout",),
        absent=("evaluation",),
        seconds_between={"rollout": 9 * 0.016},
        period=8,
        step_ms_at_least=2.0,
    ),
    # Ten milliseconds; but after a stall on a busy machine, up to 32 of the 130 steps or more that count have their
    # batch ready.
    Case("between/prefetch", 200, 8, between=("data",), step_ms_at_least=7.5),
    Case("between/epochs", 52, 100 / 13, between=("evaluation",), period=13, per_step_may_miss_share=0.05),
    Case(
        "between/periodic_sleep",
        60,
        8,
        between=("other",),
        seconds_between={"other": 14 * 0.03},
        step_ms_at_least=7.5,
        absent=("evaluation", "rollout"),
        period=4,
        in_make_test=True,
    ),
    Case("between/garbage", 60, 8, between=("garbage collection",), period=5),
    Case("between/lengths", 60, 80, unit="tokens", period=4, per_step_may_miss_share=0.05, in_make_test=True),
    Case("between/frozen_mode", 40, 6, absent=("evaluation", "rollout")),
    Case("between/inference", 40, 8, training=False, in_make_test=True),
    Case("between/sorted_imports", 40, 8),
)

PROCESSES = (
    Case("processes/thread", 40, 8, in_make_test=True),
    Case("processes/spawn", 40, 16, ranks=2),
    Case("processes/ddp", 40, 16, ranks=2, name="module_torchrun", launch=("-m", "torch.distributed.run", *TORCHRUN)),
    Case("processes/ddp", 40, 16, ranks=2, name="torchrun", launch=("torchrun", *TORCHRUN)),
    Case("processes/child", 40, 8),
)
