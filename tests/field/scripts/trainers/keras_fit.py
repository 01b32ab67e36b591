"""Keras on the torch backend: its optimizer is Keras's own, and fit evaluates after each epoch of 20 batches."""

import os
import sys

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np

num_steps = int(sys.argv[1])
keras.utils.set_random_seed(0)
inputs = np.random.default_rng(0).standard_normal((160, 32)).astype("float32")
labels = (inputs[:, 0] > 0).astype("int64")
model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(2)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=keras.optimizers.Adam(), loss=loss)
history = model.fit(
    inputs, labels, batch_size=8, epochs=num_steps // 20, validation_data=(inputs[:40], labels[:40]), verbose=0
)
print(repr(history.history["loss"][-1]))
