"""Hugging Face Trainer: accumulation of two, an evaluation and a checkpoint every 20 steps, evaluation first."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback

num_steps = int(sys.argv[1])
set_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=32, n_embd=32, n_layer=1, n_head=2))
texts = [{"input_ids": row, "labels": row} for row in torch.randint(128, (64, 16))]
arguments = TrainingArguments(
    output_dir="out",
    max_steps=num_steps,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    eval_strategy="steps",
    eval_steps=20,
    eval_on_start=True,
    save_steps=20,
    logging_steps=10,
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=texts, eval_dataset=texts[:16])
trainer.remove_callback(PrinterCallback)  # it prints times
print(repr(trainer.train().training_loss), trainer.state.global_step)
