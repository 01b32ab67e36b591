"""TRL's DPOTrainer: a frozen reference model runs beside the one that is trained."""

import sys

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed
from transformers.trainer_callback import PrinterCallback
from trl import DPOConfig, DPOTrainer

num_steps = int(sys.argv[1])
set_seed(0)
words = {word: i for i, word in enumerate(["<pad>", "<eos>", *(f"w{i}" for i in range(62))])}
backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2)
model, reference = GPT2LMHeadModel(config), GPT2LMHeadModel(config)
pairs = Dataset.from_dict(
    {
        "prompt": [f"w{i} w{i + 1}" for i in range(48)],
        "chosen": [f" w{i + 2} w{i + 3}" for i in range(48)],
        "rejected": [f" w{i} w{i}" for i in range(48)],
    }
)
arguments = DPOConfig(
    output_dir="out",
    max_steps=num_steps,
    per_device_train_batch_size=4,
    logging_steps=10,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    bf16=False,
    disable_tqdm=True,
)
trainer = DPOTrainer(model, reference, arguments, train_dataset=pairs, processing_class=tokenizer)
trainer.remove_callback(PrinterCallback)  # it prints times
print(repr(trainer.train().training_loss), trainer.state.global_step)
