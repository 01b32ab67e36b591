"""BERT-base fine-tuned as a classifier: texts of 16 to 256 tokens padded to 256, a DataLoader, bf16 autocast."""

import sys

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

tiny = "--tiny" in sys.argv
device = "cuda" if torch.cuda.is_available() else "cpu"
config, batch, length = BertConfig(num_labels=2), 64, 256
if tiny:
    config = BertConfig(
        vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=2
    )
    batch, length = 4, 32


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        number = int(torch.randint(length // 16, length + 1, ()))
        tokens, mask = torch.zeros(length, dtype=torch.long), torch.zeros(length, dtype=torch.long)
        tokens[:number], mask[:number] = torch.randint(1, config.vocab_size, (number,)), 1
        return {"input_ids": tokens, "attention_mask": mask, "labels": index % 2}


torch.manual_seed(0)
with torch.device(device):
    model = BertForSequenceClassification(config).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
for number, texts in enumerate(DataLoader(Texts(), batch_size=batch, num_workers=0 if tiny else 4)):
    texts = {name: value.to(device) for name, value in texts.items()}
    with torch.autocast(device, torch.bfloat16):
        loss = model(**texts).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if number % 10 == 0:
        print(f"step {number}: loss {loss.item():.3f}", flush=True)
