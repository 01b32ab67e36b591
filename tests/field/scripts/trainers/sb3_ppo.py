"""stable-baselines3 PPO: rollouts of 64 states in 2 environments, then 2 epochs of 4 minibatches of 32."""

import sys

import gymnasium
import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv


class Walk(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.num_moves = 0
        return self.np_random.uniform(-1, 1, 4).astype(np.float32), {}

    def step(self, action):
        self.num_moves += 1
        state = self.np_random.uniform(-1, 1, 4).astype(np.float32)
        return state, float(action == (state[0] > 0)), self.num_moves >= 32, False, {}


num_steps = int(sys.argv[1])
environments = DummyVecEnv([Walk, Walk])
model = PPO("MlpPolicy", environments, n_steps=64, batch_size=32, n_epochs=2, seed=0, device="cpu")
model.learn(total_timesteps=128 * (num_steps // 8))
print(model._n_updates, repr(sum(p.sum().item() for p in model.policy.parameters())))
