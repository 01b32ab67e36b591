"""Did torch.compile take longer than the run could save?"""

from __future__ import annotations

from stepscope.findings.compile_log import compile_report
from stepscope.findings.rule import Case, Evidence, Finding, Unavailable, duration, one_finding, plural


def check(case: Case) -> list[Finding]:
    recording, report = case.recording, compile_report(case)
    if not report.get("num_compiles"):
        return []
    seconds, step_ns = report.get("compile_seconds"), case.clean_ns
    if not isinstance(seconds, (int, float)) or not step_ns:
        raise Unavailable("The recording has no clean steps to compare compile time with.")
    if recording.status != "finished" or (recording.facts.get("command") or {}).get("exit_after"):
        raise Unavailable("The run was cut short, so its total number of steps is unknown. Record a whole run.")
    num_steps = len(recording.samples)
    stepping_s = num_steps * step_ns / 1e9
    # If compiling halves the step, it saves as much time as all steps took.
    if seconds <= stepping_s:
        return []
    enough = round(seconds * 1e9 / step_ns)
    row = {"compile_seconds": seconds, "num_compiles": report.get("num_compiles"), "num_steps": num_steps,
           "step_ns": step_ns, "first_steps_ns": list(case.summary.warmup_ns[:4])}  # fmt: skip
    return one_finding(
        sentence=f"torch.compile took {seconds:.0f} s, but the {plural(num_steps, 'step')} of the run took only "
        f"{stepping_s:.1f} s ({duration(step_ns, 3)} each). Even if it makes every step twice as fast, it pays off "
        f"only after {plural(enough, 'step')}.",
        fix="do not compile runs this short; or compile one block, for block in model.blocks: block.compile(), "
        "and keep the cache: TORCHINDUCTOR_CACHE_DIR=/a/folder/that/stays",
        derived="compile time compared with the clean steps of the run; the fix does not make steps faster",
        confidence="high" if seconds > 2 * stepping_s else "medium",
        falsified_by="time an eager step; the finding is wrong if it takes more than twice as long as a compiled "
        "one, or if the run is usually longer",
        evidence=(Evidence("compile time", [row]),),
    )
