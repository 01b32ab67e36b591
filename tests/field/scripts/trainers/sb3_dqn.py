"""stable-baselines3 DQN: one state acted on, unbatched, between updates of 32 replayed ones; a target network."""

import sys

import gymnasium
import numpy as np
from stable_baselines3 import DQN


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
model = DQN("MlpPolicy", Walk(), learning_starts=40, train_freq=4, batch_size=32, seed=0, device="cpu")
model.learn(total_timesteps=40 + 4 * num_steps)
print(model._n_updates, repr(sum(p.sum().item() for p in model.policy.parameters())))
