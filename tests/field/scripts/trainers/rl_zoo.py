"""rl_zoo3.train: PPO on CartPole, with an evaluation callback every 256 states."""

import contextlib
import sys
from pathlib import Path

from rl_zoo3.train import train

num_steps = int(sys.argv[1])
Path("ppo.yml").write_text("CartPole-v1:\n  n_envs: 2\n  policy: MlpPolicy\n  n_timesteps: 1\n")
words = "--algo ppo --env CartPole-v1 --conf-file ppo.yml --seed 0 --device cpu --eval-freq 256 --eval-episodes 1"
sizes = ["--hyperparams", "n_steps:64", "batch_size:32", "n_epochs:2"]
sys.argv[1:] = [*words.split(), "--n-timesteps", str(128 * (num_steps // 8)), "--log-folder", "logs", *sizes]
with contextlib.redirect_stdout(sys.stderr):  # it prints times
    train()
print(len(list(Path("logs").glob("**/CartPole-v1.zip"))))
