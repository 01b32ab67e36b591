"""Starts the training script as a process of its own, as launchers do."""

import subprocess
import sys
from pathlib import Path

script = Path(__file__).parents[1] / "updates" / "plain.py"
sys.exit(subprocess.run([sys.executable, script, *sys.argv[1:]]).returncode)
