"""Megalodon's step and its moving average: what lengths, precision and the path of the average cost.

Repeats a profiling playbook. Its switch for the sequential path did nothing, so it compared FFT with FFT; its "micro"
traces were of whole models; its loop ran too few steps for its schedule; and one point out of memory lost the sweep.
"""

from typing import Any

from stepscope.errors import Unavailable
from stepscope.formatting import heading, listed, plural
from stepscope.studies.figures import BUSY, PEAK, TIME, against, crossing, published, ratios, said, speeds, told_apart
from stepscope.studies.lengths import FORMULA, growth_records
from stepscope.studies.megalodon import recordings
from stepscope.studies.megalodon.recordings import PUBLISHED, fusion, gemm_share, schedule
from stepscope.studies.stored import Rows, Stored
from stepscope.studies.study import LinesOf, Recordings, Records, Study, Sweep, TableOf, Tables, question, table_of

FFT, SEQUENTIAL, SCAN = ALL = ["fft", "sequential", "scan"]
MODES = ["forward", "forward+backward"]
TINY = {"preset": "tiny", "steps": 3, "warmup": 1}
STEP = {**TINY, "mode": "step"}
NEXT = {**TINY, "mode": "inference"}
PROFILE = {"preset": "profile", "batch": 4}
FULL_STEP = {**PROFILE, "mode": "step"}
FULL_NEXT = {**PROFILE, "mode": "inference"}
# Alone, the average has the sizes that it has in the model, so that the two can be compared.
ALONE_TINY = {**TINY, "batch": 2, "width": 64, "num_states": 4}
ALONE = {"batch": 4, "width": 384, "num_states": 8}
# The size above is host-bound on a large GPU; this one is not.
ALONE_LARGE = {"batch": 8, "width": 1024, "num_states": 16}

MEASURES = (
    Sweep(
        "steps", "megalodon", "a training step by length, dtype and bf16 reduction",
        quick=[
            {**STEP, "seq_len": [16, 32]},
            # Too large for any machine: the points after it must run all the same.
            {**STEP, "seq_len": 32, "batch": 1 << 32},
            {**STEP, "seq_len": 64},
            {**STEP, "seq_len": 16, "dtype": "bf16", "bf16_reduction": ["auto", "on", "off"]},
        ],
        full=[
            {**FULL_STEP, "seq_len": [512, 2048, 8192], "dtype": ["fp32", "tf32"]},
            {**FULL_STEP, "seq_len": 8192, "batch": 512},
            {**FULL_STEP, "seq_len": [512, 2048, 8192], "dtype": "bf16", "bf16_reduction": ["auto", "on", "off"]},
            {**FULL_STEP, "seq_len": [2048, 8192], "dtype": "autocast_bf16"},
            {**FULL_STEP, "seq_len": 32768, "dtype": "bf16"},
        ],
    ),
    Sweep(
        "average", "ema", "the moving average of one layer alone, by path",
        quick=[
            {**ALONE_TINY, "path": ALL, "seq_len": [16, 64], "mode": MODES},
            {**ALONE_TINY, "path": FFT, "seq_len": 64, "mode": "forward", "last_state": False},
        ],
        full=[
            {**ALONE, "path": [FFT, SCAN], "seq_len": [8, 64, 512, 2048, 8192], "mode": MODES},
            {**ALONE, "path": SEQUENTIAL, "seq_len": [8, 64, 512], "mode": MODES, "steps": 5},
            # The model in training does not need the state, which fft computes apart.
            {**ALONE, "path": FFT, "seq_len": [8, 64, 512, 2048, 8192], "mode": MODES, "last_state": False},
            {**ALONE_LARGE, "path": [FFT, SCAN], "seq_len": 8192, "mode": MODES},
        ],
    ),
    Sweep(
        "paths", "megalodon", "the model by the path of its moving average",
        quick=[{**TINY, "ema": [FFT, SCAN], "seq_len": [16, 64], "mode": MODES},
               {**TINY, "ema": SEQUENTIAL, "seq_len": 16, "mode": MODES}],
        full=[
            {**PROFILE, "ema": [FFT, SCAN], "seq_len": [512, 2048, 8192], "mode": MODES},
            {**PROFILE, "ema": SEQUENTIAL, "seq_len": [512, 2048], "mode": MODES, "steps": 3, "warmup": 1},
        ],
    ),
    Sweep(
        "decode", "stepscope.workloads.models.megalodon_decode:WORKLOAD",
        "the next token, from the state or recomputed",
        quick=[
            {**NEXT, "cache": "on", "ema": [FFT, SCAN], "seq_len": [32, 128]},
            {**NEXT, "cache": "off", "ema": FFT, "seq_len": [32, 128]},
        ],
        full=[
            {**FULL_NEXT, "cache": "on", "ema": ALL, "seq_len": [512, 8192]},
            {**FULL_NEXT, "cache": "off", "ema": [FFT, SCAN], "seq_len": [512, 8192]},
        ],
    ),
    Recordings(
        "short", "megalodon", "a short schedule",
        quick=[{"preset": "tiny", "seq_len": 64}],
        full=[{**PROFILE, "seq_len": [512, 2048], "dtype": "bf16"}],
        options=("--warmup", "2", "--clean", "3", "--trace", "1"),
    ),
    Recordings(
        "long", "megalodon", "a longer schedule, traced twice",
        quick=[{"preset": "tiny", "seq_len": 64}],
        full=[{**PROFILE, "seq_len": 2048, "dtype": "bf16"}],
        options=("--warmup", "5", "--clean", "10", "--trace", "2", "--repeat", "2"),
    ),
)  # fmt: skip

PLACES = {"average": ("path", "alone"), "paths": ("ema", "in the model")}
"""Measure → the knob that selects the path, and where it runs."""
SIZE = ("batch", "width", "num_states")
WITH_STATE = "fft with its last state"
"""The model needs the last state only for decoding. fft computes it apart; the other paths have it anyway."""
COMMON = f"{TIME} {BUSY} tokens_per_s {PEAK}"
HOW = {"on": "from the state", "off": "all tokens"}


def _varied(stored: Stored) -> Records:
    rows = stored.rows("average")
    return [r | {"variant": WITH_STATE if r["path"] == FFT and r["last_state"] else r["path"]} for r in rows]


@table_of("average", "Alone", f"mode variant seq_len {COMMON} speedup")
def average(stored: Stored) -> Rows:
    return stored.rows(_varied).where(**{name: stored.rows("paths").values(name) for name in SIZE})


@table_of(
    "average-larger", "Alone, in other sizes than in the model",
    f"mode seq_len {' '.join(SIZE)} variant {COMMON} speedup", is_optional=True,
)  # fmt: skip
def average_larger(stored: Stored) -> Records:
    in_model = {row["hash"] for row in stored.rows(average)}
    return [row for row in stored.rows(_varied) if row["hash"] not in in_model]


@table_of("paths", "In the model", f"mode variant seq_len {COMMON} speedup")
def paths(stored: Stored) -> Records:
    return [row | {"variant": row["ema"]} for row in stored.rows("paths").needed()]


def _comparable(stored: Stored, measure: str) -> Rows:
    """Return the rows of one of PLACES to compare paths by: fft alone without its state if every length has it."""
    if measure == "paths":
        return stored.rows(paths)
    rows, kept = stored.rows(average), []
    for of in (rows.where(mode=mode) for mode in rows.values("mode")):
        with_state, without = (set(of.ok.where(variant=each).values("seq_len")) for each in (WITH_STATE, FFT))
        kept += [row for row in of if row["variant"] != (FFT if with_state - without else WITH_STATE)]
    return Rows("average", kept).needed()


@table_of(
    "crossings", "From which length one path is faster than another",
    note="times_faster: at the longest length that both have",
)  # fmt: skip
def crossings(stored: Stored) -> Records:
    for measure, (knob, where) in PLACES.items():
        rows = _comparable(stored, measure)
        for mode in rows.values("mode"):
            of = rows.where(mode=mode).ok
            for one, other in ((SEQUENTIAL, FFT), (FFT, SCAN), (SEQUENTIAL, SCAN)):
                if row := meeting(of.where(**{knob: one}), of.where(**{knob: other})):
                    yield {"where": where, "mode": mode} | row


def meeting(one: Records, other: Records) -> dict[str, Any]:
    """Return which of two paths is faster at the longest length they share, and from which length on."""
    by_length = [{row["seq_len"]: row for row in rows} for rows in (one, other)]
    lengths = sorted(by_length[0].keys() & by_length[1].keys())
    if not lengths:
        return {}
    last = lengths[-1]
    slow, fast = sorted(by_length, key=lambda rows: -rows[last][TIME])
    won = [fast[at][TIME] < slow[at][TIME] and told_apart(fast[at], slow[at]) for at in lengths]
    first = len(won) - won[::-1].index(False) if not all(won) else 0
    begin = f"from {lengths[first]} tokens on" if won[-1] else "nowhere beyond noise"
    if won[-1] and first == 0:
        begin = f"from {lengths[0]} tokens, the shortest, on"
    elif won[-1] and fast[lengths[first - 1]][TIME] > slow[lengths[first - 1]][TIME]:
        met = crossing([slow[at] for at in lengths], [fast[at] for at in lengths], "seq_len", TIME)
        begin = f"from about {met:.0f} tokens on"
    names = {"faster": fast[last]["variant"], "than": slow[last]["variant"], "from": begin}
    return names | {"longest": last, "times_faster": slow[last][TIME] / fast[last][TIME]}


@table_of("part", "The moving average alone, times the layers, beside the model", is_optional=True)
def part(stored: Stored) -> Records:
    for whole in stored.rows("paths").ok:
        same = {name: whole[name] for name in ("seq_len", "mode", *SIZE)}
        alone = stored.rows(average).ok.where(path=whole["ema"], **same)
        for row in sorted(alone, key=lambda row: row["variant"] == WITH_STATE)[:1]:
            knobs = {"path": row["variant"], "seq_len": whole["seq_len"], "mode": whole["mode"]}
            figures = {"alone_ns": row[TIME], "num_layers": whole["layers"], "model_ns": whole[TIME]}
            yield knobs | figures | {"alone_over_model": whole["layers"] * row[TIME] / whole[TIME]}


def _by_mode(of: TableOf, y: str, modes: list[str]) -> list[LinesOf]:
    names = {mode: f"{of.id}-{mode}" if y == TIME else f"memory-{of.id}" for mode in modes}
    return [LinesOf(names[m], f"{of.title}, {m}", of, "seq_len", y, "variant", {"mode": m}) for m in modes]


@question(
    "Which path is the fastest, and from which length?",
    *_by_mode(average, TIME, MODES), *_by_mode(paths, TIME, MODES), crossings, average_larger, average, paths, part,
    claim="Its micro traces, meant to show the average alone, are of the whole model.",
)  # fmt: skip
def fastest(tables: Tables) -> str:
    rows = tables["paths"].ok.needed()
    rows = rows.where(mode=rows.values("mode")[-1])
    best, behind = rows.where(seq_len=max(rows.values("seq_len"))).least(TIME), {}
    for row, one in rows.beside(("seq_len",), ema=best["ema"]):
        behind[row["ema"]] = f"{row['ema']} is {against(row, one, best['ema'])} at {row['seq_len']}"
    return (
        f"{best['ema']} is the fastest path in the model at {best['seq_len']} tokens with {said(TIME, best[TIME])} "
        f"({best['mode']}); {listed(behind.values()) or 'no other was measured there'}."
    )


@table_of("proofs", "What ran, and how far from float64 the result is")
def proofs(stored: Stored) -> Records:
    for measure, (knob, where) in PLACES.items():
        for path in ALL:
            of = [
                row
                for row in stored.sweep(measure).rows
                if row["config"][knob] == path and row.get("samples_host_ns")
            ]
            if not of:
                continue
            proven = [row for row in of if row.get("proofs", {}).get(f"{knob}={path}")]
            last = max(proven or of, key=lambda row: row["config"]["seq_len"])
            gates = [row.get("gate") or {} for row in of]
            sizes = [gate["sizes"] for gate in gates if gate.get("sizes")]
            at = dict.fromkeys(f"{s['seq_len']} tokens × {s['batch']}, width {s['width']}" for s in sizes)
            row = {"where": where, "path": path, "num_rows": len(of), "num_proven": len(proven)}
            row["longest"] = last["config"]["seq_len"]
            row["evidence"] = (last.get("proofs") or {}).get(f"{knob}={path}") or "none"
            row["checked_at"] = listed(at) if at else "no size"
            for kind in ("outputs", "gradients"):
                off = [value for gate in gates if (value := gate.get("deviations", {}).get(kind)) is not None]
                row[kind] = f"{max(off):.1e}" if off else None
            yield row


@question(
    "Are the three paths different, and do they give the same?", proofs,
    claim="The switch for the sequential path did nothing: it compared FFT with FFT.",
)  # fmt: skip
def different(tables: Tables) -> str:
    rows = tables["proofs"].needed()
    num_rows, num_proven = (sum(row[name] for row in rows) for name in ("num_rows", "num_proven"))
    off = max(float(row[kind]) for row in rows for kind in ("outputs", "gradients") if row[kind])
    return (
        f"{num_proven} of {num_rows} rows prove that their path ran, and none is further than {off:.1e} of its norm "
        "from the sequential path in float64."
    )


STEPS = TableOf("steps", "Training steps", "steps", f"dtype bf16_reduction seq_len batch {COMMON} loss")


def _reduced(rows: Rows) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return (with, without reduction in bf16) at each length."""
    pairs = rows.ok.where(dtype="bf16", bf16_reduction=("on", "off"))
    return pairs.beside(("seq_len", "batch"), bf16_reduction="off")


@question(
    "What do precision and the reduction of bf16 products change?",
    LinesOf("steps-time", "Training steps", STEPS, "seq_len", TIME, "dtype bf16_reduction"), STEPS,
    published("published-off_over_on", "the playbook, which names no device",
              lambda s: {on["seq_len"]: off[TIME] / on[TIME] for on, off in _reduced(s.rows("steps"))}, PUBLISHED,
              "seq_len", "off_over_on"), gemm_share,
    claim="bf16 reduction makes 512 tokens 1.25 times as fast; negligible at 2048 (no device named).",
)  # fmt: skip
def precision(tables: Tables) -> str:
    ok = tables["steps"].ok.needed()
    plain = ok.where(bf16_reduction="auto", batch=ok.values("batch")[0])
    last = max((row["seq_len"] for row, _ in plain.beside(("seq_len",), dtype="fp32")), default=0)
    told = speeds(plain.where(seq_len=last), "seq_len",
                  lambda r, b: f" with {said('share', r[PEAK] / b[PEAK])} of its peak", dtype="fp32")  # fmt: skip
    text = f"At {last} tokens {told}"
    if pairs := _reduced(ok):
        beyond = [on["seq_len"] for on, off in pairs if told_apart(on, off)]
        times = ratios(on[TIME] / off[TIME] for on, off in pairs)
        where = f"at {listed(beyond)} tokens" if beyond else "at no length"
        text += f"; bf16 reduction makes a step take {times} times as long, beyond noise {where}"
    return f"{text}."


@table_of("growth", "Peaks over the length", note=FORMULA)
def growth(stored: Stored) -> Records:
    steps = stored.rows("steps").ok.where(bf16_reduction="auto").needed()
    steps = steps.where(batch=steps.values("batch")[0])
    groups = {("a step", dtype): steps.where(dtype=dtype) for dtype in steps.values("dtype")}
    for measure, (knob, where) in PLACES.items():
        rows = _comparable(stored, measure)
        mode = rows.values("mode")[-1]
        for of in (rows.where(mode=mode).ok.where(**{knob: path}) for path in ALL):
            groups |= {(f"{where}, {mode}", of[0]["variant"]): of} if len(of) else {}
    return growth_records(groups, PEAK)


@question(
    "How does memory grow with the length?", *_by_mode(average, PEAK, MODES[-1:]), *_by_mode(paths, PEAK, MODES[-1:]),
    growth,
)  # fmt: skip
def memory(tables: Tables) -> str:
    rows = tables["growth"].needed()
    fitted = [row for row in rows if row["error_share"] is not None]
    linear = sum(not row["pair_bytes"] for row in fitted)
    return (
        f"The peak of {rows[0]['of']} ({rows[0]['variant']}) {rows[0]['growth']}; {linear} of "
        f"{plural(len(fitted), 'peak')} over three lengths or more have no quadratic part."
    )


@table_of("decode", "The next token", f"how ema seq_len num_computed {TIME} {BUSY} num_kernels {PEAK}")
def decode(stored: Stored) -> Records:
    rows = stored.rows("decode").needed()
    return [r | {"how": HOW[r["cache"]], "num_computed": r.get("fact_num_computed_tokens")} for r in rows]


@question(
    "What does inference with a cache take?",
    LinesOf("decode-time", "The next token", decode, "seq_len", TIME, "how ema"), decode,
)  # fmt: skip
def cache(tables: Tables) -> str:
    rows, told = tables["decode"].ok.needed(), []
    for length in reversed(rows.values("seq_len")):
        ways = [rows.where(seq_len=length, cache=how) for how in HOW]
        if all(map(len, ways)):
            on, off = (way.least(TIME) for way in ways)
            told.append(
                f"after {length} tokens the next token takes {said(TIME, on[TIME])} from the state ({on['ema']}), "
                f"{against(on, off, 'recomputing all tokens')} in {said(TIME, off[TIME])} ({off['ema']})"
            )
    if not told:
        raise Unavailable("no length has a time with and without a cache")
    return f"{heading('; '.join(told))}."


@question(
    "What happens to the rest when one point runs out of memory?",
    TableOf("order", "In the order in which they ran", "steps", f"dtype seq_len batch status {TIME}"),
    claim="One point out of memory lost the rest of its sweep and the summary.",
)  # fmt: skip
def out_of_memory(tables: Tables) -> str:
    statuses = [row["status"] for row in tables["order"]]
    if "oom" not in statuses:
        raise Unavailable(f"none of the {len(statuses)} points of steps ran out of memory")
    after = statuses[statuses.index("oom") + 1 :]
    return (
        f"{statuses.count('oom')} of {plural(len(statuses), 'point')} ran out of memory, and {after.count('ok')} of "
        f"the {len(after)} points after it have a time."
    )


STUDY = Study(
    name="megalodon",
    title="Megalodon: lengths, precision, and three paths of a moving average",
    about="Time and memory of a step by length and precision; FFT, sequential and scan, alone and in the model.",
    measures=MEASURES,
    questions=(fastest, different, precision, memory, cache, schedule, out_of_memory, fusion),
    files={
        "summary.csv": recordings.summary_csv,
        "reports/ms_per_step.txt": recordings.figure_text("ms_per_step"),
        "reports/peak_mem_gb.txt": recordings.figure_text("peak_mem_gb"),
        "reports": recordings.key_averages,
        "traces": recordings.traces,
    },
)
