"""open_clip_train.main on synthetic images and texts, with its own model configuration."""

import json
import sys
from pathlib import Path

import open_clip
from open_clip_train.main import main

num_steps = int(sys.argv[1])
config = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}
Path("configs").mkdir()
Path("configs/tiny.json").write_text(json.dumps(config))
open_clip.add_model_config("configs")
words = "--dataset-type synthetic --model tiny --precision fp32 --batch-size 4 --epochs 1 --workers 0 --device cpu"
main([*words.split(), "--train-num-samples", str(4 * num_steps), "--log-every-n-steps", "10", "--logs", "logs"])
print("done")
