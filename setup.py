"""The compiled parts, which are optional: without a C compiler Stepscope installs without them, and does the same."""

from pathlib import Path

from setuptools import Extension, setup

FAST = Path("src/stepscope/trace/fast")


def extension(name: str, source: str, depends: list[str]) -> Extension:
    return Extension(
        name,
        sources=[source],
        depends=depends,
        extra_compile_args=["-O3", "-g0"],
        py_limited_api=True,  # one file for every Python from 3.10 on
        optional=True,
    )


setup(
    ext_modules=[
        extension(
            "stepscope.trace.fast._scan",
            str(FAST / "module.c"),
            [str(path) for path in sorted(FAST.glob("*.h"))],
        ),
        extension("stepscope.recorder.usual._notes", "src/stepscope/recorder/usual/_notes.c", []),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
