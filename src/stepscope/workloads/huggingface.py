"""Any Hugging Face configuration, `hf:path/to/config.json`, with random weights. Nothing is downloaded."""

import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stepscope.errors import MissingDependencyError, UsageError
from stepscope.workloads.users_code import nearest
from stepscope.workloads.workload import Batch, Built, Workload, knob, ran, wrote

CONFIG_FILE = "config.json"
# Classes whose `labels` have the shape of their `input_ids`.
TOKEN_LABELS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")


@dataclass(frozen=True, kw_only=True, slots=True)
class HuggingFaceConfig:
    """The knobs of a Hugging Face model; everything else is in its config.json."""

    batch: int = knob(4, "sequences per batch")
    seq_len: int = knob(512, "tokens per sequence")
    attn: Literal["sdpa", "eager"] = knob("sdpa", "attention implementation, as named by transformers")
    layers: int = knob(0, "use only this many layers; 0: as many as the configuration has")
    dropout: bool = knob(False, "keep the configuration's dropout; variants then cannot be compared")
    checkpoint: Literal[0, 1] = knob(
        0, "1: recompute every block in the backward pass (gradient_checkpointing_enable)"
    )


class HuggingFaceModel(nn.Module):
    """Tokens → logits or hidden states; with targets, which the model shifts itself, the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        out = self.model(input_ids=tokens) if targets is None else self.model(input_ids=tokens, labels=targets)
        return out[0]  # with labels the loss comes first


def hugging_face(path: str) -> Workload[HuggingFaceConfig]:
    given = _read(Path(path))
    _transformers()
    name = (given.get("architectures") or [""])[0] or f"{given['model_type']}, causal LM"
    return Workload(
        name=f"hf:{path}",
        about=f"{name} with random weights",
        config=HuggingFaceConfig,
        presets={"default": {}},
        build=lambda config: build(given, config),
        reference={"attn": "eager"},
        gate={"batch": 2, "seq_len": 16, "layers": 2, "dropout": False},
    )


def build(given: Mapping[str, Any], config: HuggingFaceConfig) -> Built:
    """Return the model of a configuration (as read from JSON), with random tokens as its batch."""
    settings = _settings(given, config)
    text = settings.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and config.seq_len > longest:
        raise UsageError(f"seq_len={config.seq_len} exceeds the configuration's max_position_embeddings, {longest}")
    kind = _class_of(given, settings)
    if config.attn == "sdpa" and not getattr(kind, "_supports_sdpa", True):
        raise UsageError(f"{kind.__name__} does not support attn=sdpa in transformers. Use --set attn=eager.")
    model = kind._from_config(settings, attn_implementation=config.attn)
    if model.main_input_name != "input_ids":
        raise UsageError(
            f"{type(model).__name__} reads {model.main_input_name}. Only models that read tokens are supported."
        )
    if config.checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    has_loss = type(model).__name__.endswith(TOKEN_LABELS)

    def batch() -> Batch:
        tokens = torch.randint(text.vocab_size, (config.batch, config.seq_len))
        return {"tokens": tokens, "targets": tokens.clone()} if has_loss else {"tokens": tokens}

    proof = (
        ran("attn=sdpa", "scaled_dot_product")
        if config.attn == "sdpa"
        else wrote("attn=eager", "softmax", without=("scaled_dot_product",), note=", no fused attention")
    )
    return Built(
        module=HuggingFaceModel(model), batch=batch, num_tokens=config.batch * config.seq_len, proofs=(proof,)
    )


def _transformers() -> Any:
    if importlib.util.find_spec("transformers") is None:
        raise MissingDependencyError("hf: workloads need transformers: pip install transformers")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    return transformers


def _read(path: Path) -> dict[str, Any]:
    file = path / CONFIG_FILE if path.is_dir() else path
    if not file.is_file():
        beside = sorted(p.name for p in file.parent.glob("*.json")) if file.parent.is_dir() else []
        raise UsageError(f"{file} not found: {nearest(file.name, beside)}")
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(given, dict) or not isinstance(given.get("model_type"), str):
        raise UsageError(f"{file} is not a transformers configuration: it has no model_type")
    if "quantization_config" in given:
        raise UsageError(
            f"{file} describes a quantized model, whose weights cannot be random. Remove quantization_config."
        )
    return given


def _settings(given: Mapping[str, Any], config: HuggingFaceConfig) -> Any:
    """Return the configuration object: float32 weights, no cache, the knobs applied."""
    known = _transformers().CONFIG_MAPPING
    model_type = given["model_type"]
    if model_type not in known:
        own = "; custom code (auto_map) is never run" if "auto_map" in given else ""
        raise UsageError(f"transformers does not know model_type {model_type!r}: {nearest(model_type, known)}{own}")
    kind = known[model_type]
    kept = {key: value for key, value in given.items() if key not in ("auto_map", "dtype", "torch_dtype")}
    if config.layers:
        count = kind.attribute_map.get("num_hidden_layers", "num_hidden_layers")
        kept = _shorter(kept, count, config.layers)
    settings = kind.from_dict(kept)
    parts = [settings, *(part for name in kind.sub_configs if (part := getattr(settings, name, None)) is not None)]
    for part in parts:
        part.use_cache = False
        for key, value in vars(part).items():
            if "drop" in key and isinstance(value, float) and not config.dropout:
                setattr(part, key, 0.0)
    return settings


def _shorter(given: Mapping[str, Any], count: str, num_layers: int) -> dict[str, Any]:
    """Return the configuration with fewer layers; lists with one entry per layer are shortened too.

    >>> _shorter({"n": 3, "layer_types": ["a", "b", "a"]}, "n", 2)
    {'n': 2, 'layer_types': ['a', 'b']}
    """
    if count not in given:
        raise UsageError(f"layers={num_layers}: the configuration has no {count}")
    by_layer = {key: value for key, value in given.items() if isinstance(value, list) and len(value) == given[count]}
    shorter = {key: value[:num_layers] for key, value in by_layer.items()}
    return {**given, **shorter, count: min(given[count], num_layers)}


def _class_of(given: Mapping[str, Any], settings: Any) -> Any:
    transformers = _transformers()
    if names := given.get("architectures"):
        found = getattr(transformers, names[0], None)
        if found is None:
            raise UsageError(f"transformers has no class {names[0]!r}, named in architectures")
        return found
    causal = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(settings) not in causal:
        raise UsageError(f"{given['model_type']} has no causal LM. Name the class in architectures.")
    return causal[type(settings)]
