"""The hook around an import: it sees the import itself, and nothing else that looks for the module."""

import importlib
import importlib.util
import sys

import pytest

from stepscope.recorder.processes.imports import AfterImport


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that says when it runs, and fails the first time if told to."""
    source = "from hooked_events import events\nevents.append('runs')\nif 'fail' in events:\n    raise OSError\n"
    (tmp_path / "hooked.py").write_text(source)
    (tmp_path / "hooked_events.py").write_text("events = []")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("hooked_events").events
    for name in ("hooked", "hooked_events"):
        sys.modules.pop(name, None)
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, AfterImport)]


def watch(events):
    return AfterImport({"hooked": lambda: events.append("after")}, before=lambda: events.append("before"))


def test_both_functions_run_around_the_import_and_then_never_again(module):
    hook = watch(module)
    imported = importlib.import_module("hooked")
    assert module == ["before", "runs", "after"]
    assert hook not in sys.meta_path
    assert "exec_module" not in vars(imported.__loader__)
    importlib.reload(imported)
    assert module == ["before", "runs", "after", "runs"]


def test_looking_for_the_module_is_not_importing_it(module):
    hook = watch(module)
    for _ in range(3):
        assert importlib.util.find_spec("hooked").origin.endswith("hooked.py")
    assert module == [] and hook in sys.meta_path
    importlib.import_module("hooked")
    assert module == ["before", "runs", "after"]


def test_an_import_that_fails_is_waited_for_again(module):
    watch(module)
    module.append("fail")
    with pytest.raises(OSError):
        importlib.import_module("hooked")
    module.clear()
    importlib.import_module("hooked")
    assert module == ["before", "runs", "after"]


def test_two_hooks_on_one_module_both_run(module):
    watch(module)
    AfterImport({"hooked": lambda: module.append("other")})
    importlib.util.find_spec("hooked")
    importlib.import_module("hooked")
    assert sorted(module) == ["after", "before", "other", "runs"]


def test_a_loader_that_is_found_twice_reports_once(module):
    spec = importlib.util.find_spec("hooked")

    class Same:
        @staticmethod
        def find_spec(name, path=None, target=None):
            return spec if name == "hooked" else None

    sys.meta_path.insert(0, Same)
    try:
        watch(module)
        importlib.util.find_spec("hooked")
        importlib.import_module("hooked")
    finally:
        sys.meta_path.remove(Same)
    assert module == ["before", "runs", "after"]


def test_a_removed_hook_does_nothing(module):
    hook = watch(module)
    importlib.util.find_spec("hooked")
    hook.remove()
    hook.remove()
    importlib.import_module("hooked")
    assert module == ["runs"]


def test_one_hook_waits_for_each_of_its_modules(module):
    hook = AfterImport({name: lambda name=name: module.append(name) for name in ("hooked", "hooked_too")})
    importlib.import_module("hooked")
    assert module == ["runs", "hooked"] and sys.meta_path.count(hook) == 1
    hook.remove()
