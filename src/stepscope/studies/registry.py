"""Finds studies: built-in ones by name, a user's own by path."""

import importlib
from pathlib import Path

from stepscope.errors import UsageError
from stepscope.studies.study import Study
from stepscope.workloads.knobs import nearest
from stepscope.workloads.users_code import module_from_file

STUDIES = ("cs336", "megalodon", "hydra", "nano", "tsmoe")


def find_study(name: str) -> Study:
    """Return the study of that name or file: path/to/study.py with a STUDY in it, or path/to/study.toml."""
    if name in STUDIES:
        study = importlib.import_module(f"stepscope.studies.{name}.study").STUDY
        assert isinstance(study, Study)
        return study
    if name.endswith(".py"):
        study = getattr(module_from_file(Path(name)), "STUDY", None)
        if not isinstance(study, Study):
            raise UsageError(f"{name} has no STUDY: STUDY = Study(name=…, …), see docs/studies.md")
        return study
    if name.endswith(".toml"):
        from stepscope.studies.toml_study import study_from_toml

        return study_from_toml(Path(name))
    raise UsageError(f"there is no study {name!r}: {nearest(name, STUDIES)} You can also name a file.py or file.toml")
