"""The compiled part, which is optional: without a C compiler Stepscope installs without it, and reads the same."""

from pathlib import Path

from setuptools import Extension, setup

FAST = Path("src/stepscope/trace/fast")

setup(
    ext_modules=[
        Extension(
            "stepscope.trace.fast._scan",
            sources=[str(FAST / "module.c")],
            depends=[str(path) for path in sorted(FAST.glob("*.h"))],
            extra_compile_args=["-O3", "-g0"],
            py_limited_api=True,  # one file for every Python from 3.10 on
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
