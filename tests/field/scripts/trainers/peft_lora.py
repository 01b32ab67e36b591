"""PEFT: LoRA adapters on a frozen GPT-2, trained in a plain loop; the adapters are saved as safetensors every 10."""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

num_steps = int(sys.argv[1])
torch.manual_seed(0)
base = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=32, n_embd=32, n_layer=1, n_head=2))
model = get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"))
optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
for step in range(num_steps):
    tokens = torch.randint(128, (4, 16))
    loss = model(input_ids=tokens, labels=tokens).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if (step + 1) % 10 == 0:
        model.save_pretrained("adapter")
print(repr(loss.item()))
