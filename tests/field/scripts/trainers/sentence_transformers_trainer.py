"""sentence-transformers: two columns of sentences are two forwards of one batch of pairs."""

import sys

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, losses
from sentence_transformers.models import Pooling, Transformer
from sentence_transformers.training_args import SentenceTransformerTrainingArguments
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, set_seed
from transformers.trainer_callback import PrinterCallback

num_steps = int(sys.argv[1])
set_seed(0)
words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(60))])}
backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", model_max_length=16).save_pretrained("bert")
config = BertConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
    max_position_embeddings=32,
)  # fmt: skip
BertModel(config).save_pretrained("bert")
body = Transformer("bert", max_seq_length=16)
model = SentenceTransformer(modules=[body, Pooling(32)], device="cpu")
pairs = Dataset.from_dict({
    "anchor": [f"w{i % 60} w{(i + 1) % 60} w{(i + 2) % 60}" for i in range(64)],
    "positive": [f"w{(i + 1) % 60} w{i % 60} w{(i + 3) % 60}" for i in range(64)],
})  # fmt: skip
arguments = SentenceTransformerTrainingArguments(
    output_dir="out", max_steps=num_steps, per_device_train_batch_size=8, save_strategy="no", report_to="none",
    use_cpu=True, disable_tqdm=True,
)  # fmt: skip
trainer = SentenceTransformerTrainer(model, arguments, pairs, loss=losses.MultipleNegativesRankingLoss(model))
trainer.remove_callback(PrinterCallback)  # it prints times
print(repr(trainer.train().training_loss), trainer.state.global_step)
