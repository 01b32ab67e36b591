"""Show what this machine has, and what Stepscope can measure on it.

Prints the versions, each device with its dense peaks and where they come from, whether GPU
counters (NVML) can be read, and the ceilings measured here before. Works without torch.

Says for each kind of measurement whether it works here, and what to type if it does not. A
cache folder that other users can write to, which Stepscope would refuse, is repaired.

--measure runs matrix products and copies for some seconds on each kind of GPU, or on the CPU
if torch finds no GPU, and keeps the result for later recordings.

--json prints one object:
  stepscope, python, platform   versions
  torch      {version, cuda, hip} or null; torch_problem says why it is null or finds no GPU
  nvml       {driver} or null; nvml_problem says why
  devices    [{device, name, memory_bytes, peaks, ceilings}]: device is "cuda:0", "cpu", or "gpu"
             for a GPU that the driver shows and torch does not use; peaks is {flops by dtype,
             bandwidth_bytes_per_s, source, note} or null; ceilings is {matmul_flops by dtype,
             copy_bytes_per_s, measured_at, torch_version} or null
  abilities  [{what, works, next}]: next is what to do if it does not work, else null
  repaired   what was repaired, as texts

examples:
  stepscope doctor
  stepscope doctor --measure
"""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from stepscope import devices
from stepscope.errors import MissingDependencyError
from stepscope.recorder.machine.cpu import cpu_name
from stepscope.recorder.machine.nvml import Nvml, NvmlUnavailable
from stepscope.user_cache import cache_folder, own_folder
from stepscope.version import __version__

INSTALL_TORCH = "pip install torch"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--measure", action="store_true", help="measure the ceilings and keep them")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def main(arguments: argparse.Namespace) -> int:
    torch, torch_problem = _import_torch()
    if arguments.measure and torch is None:
        raise MissingDependencyError(f"--measure needs torch: {torch_problem}")
    nvml, nvml_problem, nvml_gpus = _look_at_nvml()
    found, cuda_problem = _look_at_torch(torch) if torch else ([], None)
    if not found:
        found = [{"device": "gpu", **gpu} for gpu in nvml_gpus]
        found.append({"device": "cpu", "name": cpu_name(), "memory_bytes": None})
    if arguments.measure:
        _measure_each(found)
    for device in found:
        peak, ceilings = devices.find_device(device["name"]), devices.load_ceilings(device["name"])
        device["peaks"] = peak and {
            "flops": dict(peak.peak_flops),
            "bandwidth_bytes_per_s": peak.bandwidth_bytes_per_s,
            "source": peak.source,
            "note": peak.note,
        }
        device["ceilings"] = ceilings and ceilings.to_json()
    report = {
        "stepscope": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch and {"version": str(torch.__version__), "cuda": torch.version.cuda, "hip": torch.version.hip},
        "torch_problem": torch_problem or cuda_problem,
        "nvml": nvml,
        "nvml_problem": nvml_problem,
        "devices": found,
        "abilities": list(_abilities(torch, nvml_problem)),
        "repaired": _repair(),
    }
    print(json.dumps(report, indent=1) if arguments.json else "\n".join(_lines(report)))
    return 0


def _abilities(torch: Any, nvml_problem: str | None) -> Iterator[dict[str, Any]]:
    """Yield what can be done here; with `next`, what would make it work."""
    on_gpu = torch is not None and torch.cuda.is_available()
    install = f"`{INSTALL_TORCH}`"
    gpu = "needs a GPU and its PyTorch. `stepscope analyze TRACE` reads what another machine measured"
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    for what, works, following in (
        ("read recordings and traces", _has("polars") and _has("msgspec"), "`pip install stepscope`"),
        ("write the report's page", _has("plotly"), "`pip install stepscope`"),
        ("write charts as PNG", _has("matplotlib"), "`pip install 'stepscope[png]'`"),
        ("measure a script on the CPU", torch is not None, install),
        ("measure GPU time and memory", on_gpu, gpu if torch else install),
        ("read GPU clocks, power and other processes", nvml_problem is None, gpu),
        ("plan without a GPU", torch is not None, install),
        ("verify torch.compile", torch and (on_gpu or compiler), "`apt-get install g++`" if torch else install),
        ("write into this folder", os.access(Path.cwd(), os.W_OK), "`stepscope run -o FOLDER train.py`"),
    ):
        yield {"what": what, "works": bool(works), "next": None if works else following}


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _repair() -> list[str]:
    """Take write permission for others off the cache folder, if it is this user's. Return what was done."""
    try:
        own_folder(create=True)
    except (OSError, RuntimeError):
        folder = cache_folder().resolve()
        if folder.is_dir() and folder.stat().st_uid == os.geteuid():
            folder.chmod(0o700)
            return [f"{folder} could be written by other users: now only by you"]
    return []


def _import_torch() -> tuple[Any, str | None]:
    try:
        import torch
    except ModuleNotFoundError as error:
        missing = error.name == "torch"
        return None, f"not installed: {INSTALL_TORCH}" if missing else f"cannot be imported: {error}"
    except (ImportError, OSError) as error:
        return None, f"cannot be imported: {error}"
    return torch, None


def _look_at_torch(torch: Any) -> tuple[list[dict[str, Any]], str | None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()  # says in a warning why a driver does not do
    if not available:
        return [], str(caught[0].message).partition("\n")[0] if caught else None
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        name = torch.cuda.get_device_name(index)
        found.append({"device": f"cuda:{index}", "name": name, "memory_bytes": properties.total_memory})
    return found, None


def _look_at_nvml() -> tuple[dict[str, str | None] | None, str | None, list[dict[str, Any]]]:
    try:
        nvml = Nvml()
        gpus = [nvml.gpu(uuid) for uuid in nvml.gpu_uuids()]
        memory = [gpu.memory_bytes() for gpu in gpus]
        named = [{"name": g.name() or "?", "memory_bytes": m[1] if m else None} for g, m in zip(gpus, memory)]
        driver = nvml.driver_version()
        nvml.close()
    except NvmlUnavailable as error:
        return None, str(error), []
    return {"driver": driver}, None, named


def _measure_each(found: list[dict[str, Any]]) -> None:
    from stepscope.recorder.machine.ceilings import measure_ceilings

    kinds = {device["name"]: device["device"] for device in reversed(found) if device["device"] != "gpu"}
    for name, device in kinds.items():

        def progress(what: str, name: str = name) -> None:
            print(f"{name}: {what}", file=sys.stderr, flush=True)

        measured = measure_ceilings(device, progress=progress)
        for dtype, reason in measured["left_out"].items():
            progress(f"{dtype} left out: {reason}")
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        figures = measured["matmul_flops"], measured["copy_bytes_per_s"]
        ceilings = devices.Ceilings(name, *figures, measured_at=now, torch_version=measured["torch_version"])
        progress(f"kept in {devices.save_ceilings(ceilings)}")


def _lines(report: dict[str, Any]) -> Iterator[str]:
    for key in ("stepscope", "python", "platform"):
        yield f"{key:<10}{report[key]}"
    torch, problem = report["torch"], report["torch_problem"]
    if torch:
        builds = [f"{label} {torch[key]}" for key, label in (("cuda", "CUDA"), ("hip", "ROCm")) if torch[key]]
        seen = f"; no GPU: {problem}" if problem else ""
        yield f"{'torch':<10}{torch['version']} ({builds[0] if builds else 'CPU only'}){seen}"
    else:
        yield f"{'torch':<10}{problem}"
    nvml = report["nvml"]
    counters = f"driver {nvml['driver']}" if nvml else f"no GPU counters: {report['nvml_problem']}"
    yield f"{'nvml':<10}{counters}"
    yield ""
    for ability in report["abilities"]:
        answer, rest = ("yes", "") if ability["works"] else ("no", f": {ability['next']}")
        yield f"{answer:<10}{ability['what']}{rest}"
    for done in report["repaired"]:
        yield f"{'repaired':<10}{done}"
    for device in report["devices"]:
        yield ""
        memory = f", {device['memory_bytes'] / 2**30:.1f} GiB" if device["memory_bytes"] else ""
        unused = " (torch does not use it)" if device["device"] == "gpu" else ""
        yield f"{device['device']:<10}{device['name']}{memory}{unused}"
        yield from _device_lines(device)


def _device_lines(device: dict[str, Any]) -> Iterator[str]:
    peaks, ceilings = device["peaks"], device["ceilings"]
    if peaks:
        yield f"  peaks   {peaks['source']}"
        if peaks["note"]:
            yield f"          {peaks['note']}"
    else:
        advice = "" if ceilings else ": run stepscope doctor --measure"
        yield f"  peaks   no peak known for {device['name']!r}{advice}"
        near = devices.nearest_names(device["name"]) if device["device"] != "cpu" else []
        if near:
            yield f"          the table has {', '.join(near)}"
    if ceilings:
        yield f"  ceiling measured {ceilings['measured_at']} with torch {ceilings['torch_version']}"
    peak_flops = peaks["flops"] if peaks else {}
    measured_flops = ceilings["matmul_flops"] if ceilings else {}
    rows = [(d, measured_flops.get(d), peak_flops.get(d), "FLOP/s") for d in peak_flops | measured_flops]
    if rows:
        copied = ceilings["copy_bytes_per_s"] if ceilings else None
        rows.append(("memory", copied, peaks["bandwidth_bytes_per_s"] if peaks else None, "B/s"))
        yield f"          {'':<8}{'dense peak':>16}{'measured':>16}{'share':>9}"
    for name, measured, peak, unit in rows:
        share = f"{measured / peak:.1%}" if measured and peak else ""
        yield f"          {name:<8}{_rate(peak, unit):>16}{_rate(measured, unit):>16}{share:>9}".rstrip()


def _rate(value: int | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{value / 1e12:.1f} T{unit}" if value >= 1e12 else f"{value / 1e9:.1f} G{unit}"
