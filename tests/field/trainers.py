"""Trainers that people use, each around a package from PyPI."""

from __future__ import annotations

from case import Case

HUGGING_FACE = ("transformers", "accelerate")
TRL = (*HUGGING_FACE, "datasets", "trl")

TRAINERS = (
    Case(
        "trainers/transformers_trainer",
        60,
        128,
        unit="tokens",
        micro_batches=2,
        between=("evaluation", "checkpoint"),
        period=20,
        needs=HUGGING_FACE,
    ),
    Case(
        "trainers/transformers_seq2seq",
        40,
        48,
        unit="tokens",
        between=("evaluation",),
        period=20,
        needs=HUGGING_FACE,
    ),
    Case("trainers/trl_sft", 40, 64, unit="tokens", needs=TRL),
    Case("trainers/trl_dpo", 40, 40, unit="tokens", absent=("evaluation", "rollout"), needs=TRL),
    Case(
        "trainers/sentence_transformers_trainer",
        40,
        48,
        unit="tokens",
        micro_batches=None,
        needs=(*HUGGING_FACE, "datasets", "sentence_transformers"),
    ),
    Case(
        "trainers/peft_lora", 40, 64, unit="tokens", between=("checkpoint",), period=10, needs=(*HUGGING_FACE, "peft")
    ),
    Case(
        "trainers/accelerate_loop",
        48,
        16,
        micro_batches=2,
        between=("evaluation",),
        period=16,
        needs=("accelerate",),
    ),
    Case("trainers/diffusers_loop", 40, 4, between=("evaluation",), period=20, needs=("diffusers", "accelerate")),
    Case("trainers/lightning_trainer", 60, 8, between=("evaluation", "checkpoint"), period=20, needs=("lightning",)),
    Case("trainers/lightning_manual", 40, 16, micro_batches=None, updates_per_step=2, needs=("lightning",)),
    Case("trainers/lightning_ddp", 40, 16, ranks=2, needs=("lightning",)),
    Case("trainers/fabric", 40, 48, unit="tokens", needs=("lightning",)),
    Case("trainers/ignite_engine", 60, 8, between=("evaluation", "checkpoint"), period=20, needs=("ignite",)),
    Case("trainers/fastai_learner", 60, 8, between=("evaluation",), period=20, needs=("fastai",)),
    Case("trainers/skorch_net", 48, 8, between=("evaluation",), period=16, needs=("skorch",)),
    Case("trainers/keras_fit", 60, 8, between=("evaluation",), period=20, needs=("keras",)),
    Case("trainers/sb3_ppo", 40, 32, between=("rollout",), period=8, needs=("stable_baselines3",)),
    Case("trainers/sb3_dqn", 40, 32, needs=("stable_baselines3",)),
    Case("trainers/rl_zoo", 40, 32, between=("rollout",), period=8, needs=("rl_zoo3",)),
    Case(
        "trainers/litgpt_pretrain",
        40,
        128,
        unit="tokens",
        micro_batches=2,
        between=("evaluation", "checkpoint"),
        period=20,
        needs=("litgpt",),
    ),
    Case("trainers/open_clip_main", 40, 4, needs=("open_clip_train",)),
    Case("trainers/geometric", 40, None, needs=("torch_geometric",)),
    Case("trainers/monai_trainer", 40, 4, between=("evaluation",), period=10, needs=("monai", "ignite")),
    Case(
        "trainers/diffusion",
        40,
        16,
        micro_batches=2,
        between=("evaluation", "checkpoint"),
        period=20,
        needs=("denoising_diffusion_pytorch",),
    ),
    Case("trainers/timm_loop", 40, 8, between=("evaluation",), period=10, needs=("timm",)),
    Case("trainers/metric_learning", 40, 8, updates_per_step=3, period=20, needs=("pytorch_metric_learning",)),
    Case("trainers/gpytorch_fit", 40, 60, needs=("gpytorch",)),
    Case("trainers/pyro_svi", 40, 20, needs=("pyro",)),
    Case("trainers/opacus_private", 40, 8, period=20, needs=("opacus",)),
    Case("trainers/schedulefree_loop", 40, 8, between=("evaluation",), period=10, needs=("schedulefree",)),
    Case("trainers/tabnet_fit", 40, 32, between=("evaluation",), period=5, needs=("pytorch_tabnet",)),
    Case("trainers/segmentation", 40, 2, between=("evaluation",), period=10, needs=("segmentation_models_pytorch",)),
    Case(
        "trainers/x_transformers_loop",
        40,
        136,
        unit="tokens",
        per_step_may_miss_share=0.06,  # 17 tokens are 16 that are predicted
        micro_batches=4,
        between=("evaluation",),
        period=20,
        needs=("x_transformers",),
    ),
    Case("trainers/vit_distillation", 40, 8, absent=("evaluation", "rollout"), needs=("vit_pytorch",)),
)
