"""What `stepscope run` can be given instead of a script: folders, zip files, commands; and what Python refuses."""

import stat
import sys
import zipfile

import pytest

FACTS = """
import sys
print(sys.argv, sys.path[0], __name__, __file__, repr(__package__), __spec__.name, type(__loader__).__name__)
print(type(__builtins__).__name__, __cached__, sorted(set(globals()) - {"__annotations__"}))
"""


@pytest.fixture(scope="module")
def script(lab):
    script = lab.script("print('ran')")
    (script.folder / "app").mkdir()
    (script.folder / "app" / "__main__.py").write_text(FACTS)
    with zipfile.ZipFile(script.folder / "app.zip", "w") as archive:
        archive.writestr("__main__.py", FACTS)
    (script.folder / "package").mkdir()
    (script.folder / "package" / "__init__.py").write_text("")
    for name, source in {
        "binary.py": bytes(range(256)),
        "syntax.py": b"x = 1\nfor in range(3):\n",
        "latin.py": b"name = '\xe9'\n",
        "package/syntax.py": b"x = 1\nfor in range(3):\n",
    }.items():
        (script.folder / name).write_bytes(source)
    return script


@pytest.mark.parametrize("name", ["app", "app.zip"])
def test_a_folder_or_a_zip_file_runs_as_python_runs_it(script, name):
    bare = script.python(name, "--lr", "3")
    run = script.stepscope("run", "--force", "-o", "recording", "--quiet", "--", name, "--lr", "3")
    assert (run.exit_code, run.stdout) == (0, bare.stdout), run.stderr
    assert run.recording.status == "finished"


@pytest.mark.parametrize("words", [["binary.py"], ["syntax.py"], ["latin.py"], ["-m", "package.syntax"]], ids=str)
def test_a_script_that_is_not_python_fails_as_in_python(script, words):
    bare = script.python(*words)
    run = script.stepscope("run", "-o", "never", *words)
    assert (run.exit_code, run.stdout, run.stderr) == (1, "", bare.stderr)
    assert not (script.folder / "never").exists()


def test_a_command_on_the_path_runs_if_it_is_a_python_script(script):
    folder = script.folder / "commands"
    folder.mkdir()
    for name, python in {"ours": sys.executable, "any": "/usr/bin/env python3", "other": "/x/python3"}.items():
        (folder / name).write_text(f"#!{python}\nimport sys\nprint(sys.argv, sys.path[0])\n")
        (folder / name).chmod(stat.S_IRWXU)
    for name in ("ours", "any"):
        run = script.stepscope("run", "--force", "-o", "recording", "--quiet", name, "1", PATH=str(folder))
        assert (run.exit_code, run.stdout) == (0, f"{[str(folder / name), '1']} {folder}\n"), run.stderr
    assert "belongs to /x/python3" in script.stepscope("run", "other", PATH=str(folder)).error_line()
    assert "missing not found" in script.stepscope("run", "missing", PATH=str(folder)).error_line()


@pytest.mark.long
def test_looking_for_torch_before_importing_it_changes_nothing(lab):
    run = lab.script(
        """
        import importlib.util
        for _ in range(3):
            assert importlib.util.find_spec("torch").loader is not None
        from tiny import *
        for _ in range(4):
            train_step()
        assert importlib.util.find_spec("torch") is torch.__spec__
        print("exec_module" in vars(torch.__loader__))
        """
    ).run(options=("--quiet",))
    assert (run.exit_code, run.stdout) == (0, "False\n"), run.stderr
    assert run.steps == [0, 1, 2, 3]
