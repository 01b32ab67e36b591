"""pytorch-tabnet: fit of a TabNetClassifier, 5 batches of 32 rows an epoch and an evaluation after each."""

import sys

import numpy as np
from pytorch_tabnet.tab_model import TabNetClassifier

num_steps = int(sys.argv[1])
random = np.random.default_rng(0)
inputs = random.standard_normal((160, 8)).astype(np.float32)
labels = (inputs[:, 0] > 0).astype(np.int64)
model = TabNetClassifier(n_d=4, n_a=4, n_steps=2, seed=0, verbose=0, device_name="cpu")
model.fit(
    inputs, labels, eval_set=[(inputs[:40], labels[:40])], max_epochs=num_steps // 5, patience=0, batch_size=32,
    virtual_batch_size=32, drop_last=False,
)  # fmt: skip
print(repr(float(model.history["loss"][-1])))
