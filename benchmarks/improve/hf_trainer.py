"""A Hugging Face Trainer with its defaults on a GPT-2 of random weights: float32, eager."""

import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--tiny", action="store_true")
tiny = parser.parse_args().tiny
length, batch = (32, 2) if tiny else (512, 16)


class Text(Dataset):
    def __init__(self):
        self.rows = torch.randint(128 if tiny else 50257, (4096, length), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


if __name__ == "__main__":
    shape = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 128} if tiny else {}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_positions=length, **shape))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=batch, max_steps=1000, report_to=[], save_strategy="no"
        )
        Trainer(model=model, args=arguments, train_dataset=Text()).train()
