"""TRL's SFTTrainer on a conversation-free dataset of token ids, packed to 16 tokens."""

import sys

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed
from transformers.trainer_callback import PrinterCallback
from trl import SFTConfig, SFTTrainer

num_steps = int(sys.argv[1])
set_seed(0)
words = {word: i for i, word in enumerate(["<pad>", "<eos>", *(f"w{i}" for i in range(62))])}
backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2))
texts = Dataset.from_dict({"text": [" ".join(f"w{(i + j) % 62}" for j in range(15)) for i in range(64)]})
arguments = SFTConfig(
    output_dir="out",
    max_steps=num_steps,
    per_device_train_batch_size=4,
    max_length=16,
    logging_steps=10,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    bf16=False,
    disable_tqdm=True,
)
trainer = SFTTrainer(model, arguments, train_dataset=texts, processing_class=tokenizer)
trainer.remove_callback(PrinterCallback)  # it prints times
print(repr(trainer.train().training_loss), trainer.state.global_step)
