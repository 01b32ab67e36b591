"""Did compiling take longer than the run could win back?"""

from __future__ import annotations

from stepscope.errors import Unavailable
from stepscope.findings.compile_log import compile_report
from stepscope.findings.finding import Evidence, Finding
from stepscope.formatting import duration, plural
from stepscope.session.case import Case


def check(case: Case) -> list[Finding]:
    recording = case.recording
    report = compile_report(case)
    if not report.get("num_compiles"):
        return []
    seconds, step_ns = report.get("compile_seconds"), case.clean_ns
    if not isinstance(seconds, (int, float)) or not step_ns:
        raise Unavailable("the recording has no clean steps to set compiling against")
    if recording.status != "finished" or (recording.facts.get("command") or {}).get("exit_after"):
        raise Unavailable("the run was cut short, so that a whole one's steps are not known: record one to its end")
    num_steps = len(recording.samples)
    stepping_s = num_steps * step_ns / 1e9
    # Were an uncompiled step twice as long, compiling would have saved as much as all steps took.
    if seconds <= stepping_s:
        return []
    enough = round(seconds * 1e9 / step_ns)
    return [
        Finding(
            sentence=f"torch.compile took {seconds:.0f} s for a run of {plural(num_steps, 'step')} of "
            f"{duration(step_ns, 3)}, {stepping_s:.1f} s in all: had it made each step twice as fast, it would have "
            f"paid after {plural(enough, 'step')}.",
            fix="leave torch.compile out of runs this short; or compile one block, for block in model.blocks: "
            "block.compile(), and keep the cache: TORCHINDUCTOR_CACHE_DIR=/a/folder/that/stays",
            derived="seconds of compiling against the clean steps of the run; it is no part of a step, so that no "
            "step is saved",
            confidence="high" if seconds > 2 * stepping_s else "medium",
            falsified_by="an eager step more than twice as long as the compiled one, or a run that goes on longer",
            evidence=(
                Evidence(
                    "compiling",
                    [
                        {
                            "compile_seconds": seconds,
                            "num_compiles": report.get("num_compiles"),
                            "num_steps": num_steps,
                            "step_ns": step_ns,
                            "first_steps_ns": list(case.summary.warmup_ns[:4]),
                        }
                    ],
                ),
            ),
        )
    ]
