"""The fields of `recording.json`: what they mean, and what each must be to be believed."""

from typing import Any, TypedDict

from stepscope.border import COUNT, FLAG, INTEGER, NUMBER, PLAIN, TEXT


class RecordingFacts(TypedDict, total=False):
    """`recording.json`. Fields are absent until known, so a killed run has only the first ones."""

    schema_version: int
    status: str  # `finished`, `failed`, or `interrupted` (killed, or still running)
    command: dict[str, Any]
    """`argv`, whether it ran as a `module`, the working `folder`, whether `--exit-after` was given, the `program` as
    named and the `sha256` of its file; for a process that the program started, its own `script` and
    `script_sha256`."""
    config: dict[str, Any]  # resolved settings: arguments, windows, tokens per step
    config_hash: str  # first 16 hex digits of the SHA-256 of `config`
    git: dict[str, Any] | None
    """Revision of the script's repository and whether it was modified; null without a repository."""
    started_at: str
    job: str
    """What recordings of one job have in common when it is restarted: `STEPSCOPE_JOB`, `SLURM_JOB_ID` or
    `TORCHELASTIC_RUN_ID`; absent if none is set."""
    finished_at: str
    exit_code: int  # the script's exit code; absent for `stepscope.record()`
    exception: str
    num_child_processes: int  # processes the script started through multiprocessing
    num_planned_steps: int  # steps that the trainer said it would make, from the beginning of the recording
    pid: int
    host: str  # the machine on which that process runs
    environment: dict[str, Any]
    """Versions, device name, threads, float32 matmul setting, environment variables that affect speed."""
    precision: dict[str, Any]  # torch's precision settings at the end of the clean window (docs/precision.md)
    flags: dict[str, Any]
    """Torch's switches that affect speed (`cudnn.benchmark`, `cudnn.deterministic`, `deterministic_algorithms`),
    whether the CPU has instructions for bfloat16 (`cpu.bf16`), `num_threads` and `num_cores`."""
    loader: dict[str, Any]
    """The first DataLoader: `num_workers`, `prefetch_factor`, `pin_memory`, `persistent_workers`, `batch_size`."""
    padding: dict[str, int]
    """In the memory window, `num_positions` of the inputs, those in use (`num_used`), and `num_to_longest` if each
    batch were padded to its longest row; zeros if the model reads no text. If it has labels,
    `num_labels` of the loss with most classes, and `num_ignored`, those that it leaves out."""
    steps: dict[str, Any]
    """`source` of the step boundaries (`step()`, `optimizer`, `update`, `forward`), `num_sources`, `num_steps`,
    `num_earlier` steps of models that were trained before, batches that may be `num_prefetched`, and
    `num_lines_dropped` beyond the limit or on a full disk."""
    between: dict[str, dict[str, int]]
    """What the loop does between steps (`evaluation`, `checkpoint`, …): lines of the script, and how often each."""
    windows: dict[str, int]  # requested steps of each window
    triggered: dict[str, Any]
    """For a window of `stepscope trigger`: its `number`, its `reason` and its `first_step` in the run."""
    roots: list[str]  # classes of the modules that the script calls itself
    bypassed: list[str]  # classes of those that torch.compile has wrapped, and that are called without the wrapper
    parameters: dict[str, Any]
    """`num_total`, `num_trainable`, `bytes_by_dtype`; shared parameters count once. `without_optimizer`: the largest
    modules whose trainable parameters are in no optimizer, by `module` and `num_parameters`."""
    memory: dict[str, int]
    """Peaks at the end of the clean window: `peak_allocated_bytes`, `peak_reserved_bytes`, `driver_used_bytes`,
    `driver_total_bytes`, `num_allocator_retries`, `num_allocator_ooms` on a GPU; `peak_resident_bytes` always."""
    trace: dict[str, Any] | None
    """The trace's `file` and `bytes`, and what was `trimmed`; of its whole steps `num_steps`, `window_ns`, `num_ops`,
    `num_kernels`, `num_template_kernels`, `num_host_copies`, `num_graph_launches`, `gpu_busy_ns`,
    `gpu_busy_ns_by_phase`; with `--repeat` the same for each further trace window under `repeated`.
    """
    python: dict[str, Any]
    """Where Python was in the step before the trace: `num_samples` of the stack, and `lines` by `phase`, `place` and
    `num_samples`."""
    flops: dict[str, Any]
    """One step's FLOPs `by_op` (op, phase, dtype, recomputed), `model_flops_by_dtype`, `uncounted` ops, and the
    `weights` with size and forward FLOPs."""
    attention: list[dict[str, Any]]
    """Distinct attention calls in the memory window: `query`, `key`, `value` and `mask` shapes, `dtype`, `is_causal`,
    `dropout`, `module`, `caller`, `num_calls`; the `backend` torch chose, `switched_off` ones, and torch's messages
    for those it `refused` (docs/attention.md).
    """
    counters: dict[str, Any]
    """`other_processes` on the GPU at the end of the run; `max_sm_clock_mhz`, `power_limit_watts`,
    `default_power_limit_watts` if the driver reports them."""
    fixes: list[dict[str, Any]]
    """For a run of `stepscope verify` with a fix: its `id` and `value`, what was `changed` and how often, what was
    `left` unchanged and why, the message if `nothing_seen` could be changed, and whether it `resamples`: the model
    draws other random numbers with it."""
    notes: list[dict[str, str]]  # remarks for the reader: `about` and `text`


OF_A_GPU = {"peak_allocated_bytes", "peak_reserved_bytes", "driver_used_bytes", "driver_total_bytes",
            "num_allocator_retries"}  # fmt: skip
"""What `memory` has of a GPU: all of it, or nothing."""
_EACH_COUNT, _EACH_TEXT = {"*": COUNT}, {"*": TEXT}
_TRACE_WINDOW = {
    "file?": TEXT, "bytes?": COUNT, "trimmed~": TEXT, "num_steps?": COUNT, "window_ns?": COUNT, "num_ops?": COUNT,
    "num_kernels?": COUNT, "num_template_kernels?": COUNT, "num_host_copies?": COUNT, "num_graph_launches?": COUNT,
    "gpu_busy_ns?": COUNT, "gpu_busy_ns_by_phase?": _EACH_COUNT,
}  # fmt: skip
_SHAPE = {"query~": [COUNT], "key~": [COUNT], "value~": [COUNT], "mask~": [COUNT]}
SCHEMA: dict[str, Any] = {
    "schema_version": COUNT,
    "status": TEXT,
    "command": {
        "argv?": [TEXT], "module~": FLAG, "folder?": TEXT, "exit_after?": PLAIN, "program?": TEXT, "sha256?": TEXT,
        "script?": TEXT, "script_sha256~": TEXT,
    },
    "config": {"argv?": [TEXT], "windows?": _EACH_COUNT, "tokens_per_step~": COUNT, "*": PLAIN},
    "config_hash": TEXT,
    "git": {"revision~": TEXT, "modified~": FLAG},
    "started_at": TEXT,
    "job": TEXT,
    "finished_at": TEXT,
    "exit_code": INTEGER,
    "exception": TEXT,
    "num_child_processes": COUNT,
    "num_planned_steps": COUNT,
    "pid": COUNT,
    "host": TEXT,
    "environment": {
        **dict.fromkeys(("device~", "device_name~", "torch~", "python~", "platform~", "float32_matmul~"), TEXT),
        **{"rank?": COUNT, "world_size?": COUNT, "variables?": _EACH_TEXT, "*": PLAIN},
    },
    "precision": {"*": PLAIN},
    "flags": {
        **dict.fromkeys(
            ("cudnn.benchmark?", "cudnn.deterministic?", "deterministic_algorithms?", "cpu.bf16?"), FLAG
        ),
        **{"num_threads?": COUNT, "num_cores?": COUNT},
    },
    "loader": {
        "num_workers?": COUNT, "prefetch_factor~": COUNT, "pin_memory~": FLAG, "persistent_workers~": FLAG,
        "batch_size~": COUNT,
    },
    "padding": {
        "num_positions": COUNT, "num_used": COUNT, "num_to_longest": COUNT, "num_labels?": COUNT,
        "num_ignored?": COUNT,
    },
    "steps": {
        "source~": TEXT, "num_sources?": COUNT, "num_steps?": COUNT, "num_earlier?": COUNT, "num_prefetched?": COUNT,
        "num_lines_dropped?": COUNT,
    },
    "between": {"*": _EACH_COUNT},
    "windows": _EACH_COUNT,
    "triggered": {"number": COUNT, "reason": TEXT, "first_step": COUNT},
    "roots": [TEXT],
    "bypassed": [TEXT],
    "parameters": {
        "num_total": COUNT, "num_trainable": COUNT, "bytes_by_dtype": _EACH_COUNT,
        "without_optimizer?": [{"module": TEXT, "num_parameters": COUNT}],
    },
    "memory": _EACH_COUNT,
    "trace": {**_TRACE_WINDOW, "repeated?": [_TRACE_WINDOW]},
    "python": {"num_samples": COUNT, "lines": [{"phase": TEXT, "place": TEXT, "num_samples": COUNT}]},
    "flops": {
        "by_op": [{"op": TEXT, "phase": TEXT, "dtype": TEXT, "recomputed": FLAG, "flops": COUNT}],
        "model_flops_by_dtype": _EACH_COUNT,
        "uncounted": [{"op": TEXT, "num_calls": COUNT, "num_elements?": COUNT}],
        "weights": [{"num_elements": COUNT, "forward_flops": COUNT, "looked_up": FLAG, "used?": FLAG}],
        "forward_activation_flops": COUNT,
        "compiled": FLAG,
        "error~": TEXT,
        "hidden_products?": [TEXT],
    },
    "attention": [{
        **_SHAPE, "dtype~": TEXT, "is_causal~": FLAG, "dropout~": NUMBER, "module~": TEXT, "caller~": TEXT,
        "num_calls?": COUNT, "backend~": TEXT, "switched_off?": [TEXT], "refused?": {"*": [TEXT]},
    }],
    "counters": {
        "other_processes~": [{"pid~": COUNT, "name~": TEXT, "used_bytes~": COUNT}], "max_sm_clock_mhz~": NUMBER,
        "power_limit_watts~": NUMBER, "default_power_limit_watts~": NUMBER,
    },
    "fixes": [{"id": TEXT, "value~": TEXT, "changed": _EACH_COUNT, "left": {"*": PLAIN}, "nothing_seen~": TEXT,
               "resamples?": FLAG}],
    "notes": [{"about": TEXT, "text": TEXT}],
}  # fmt: skip
"""What the fields of `recording.json` must be. A field that is not is left out, as in a recording that lacks it."""
