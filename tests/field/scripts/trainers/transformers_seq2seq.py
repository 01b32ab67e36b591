"""Hugging Face Seq2SeqTrainer: a small T5 that generates in its evaluation."""

import sys

import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration, set_seed
from transformers.trainer_callback import PrinterCallback

num_steps = int(sys.argv[1])
set_seed(0)
config = T5Config(
    vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0, use_cache=False
)
model = T5ForConditionalGeneration(config)
pairs = [{"input_ids": row, "labels": row[:8]} for row in torch.randint(2, 64, (48, 12))]
arguments = Seq2SeqTrainingArguments(
    output_dir="out",
    max_steps=num_steps,
    per_device_train_batch_size=4,
    eval_strategy="steps",
    eval_steps=20,
    predict_with_generate=True,
    generation_max_length=6,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
)
trainer = Seq2SeqTrainer(model, arguments, train_dataset=pairs, eval_dataset=pairs[:8])
trainer.remove_callback(PrinterCallback)  # it prints times
print(repr(trainer.train().training_loss), trainer.state.global_step)
