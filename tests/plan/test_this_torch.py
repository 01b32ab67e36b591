"""A PyTorch that has not what a plan uses of its inside: one line with its version, and only then."""

from __future__ import annotations

import sys

import pytest

torch = pytest.importorskip("torch")

from stepscope.cli.main import main

PLAN = ["plan", "cs336", "--preset", "tiny", "--set", "seq_len=16"]


def said(capsys, *arguments):
    assert main([*PLAN, *arguments]) == 2
    return capsys.readouterr().err


def test_a_part_that_is_missing_is_named_with_the_version(monkeypatch, capsys):
    monkeypatch.delattr(torch._C, "_set_mkldnn_enabled")

    assert f"torch {torch.__version__} lacks a part that plans use" in (text := said(capsys))
    assert "_set_mkldnn_enabled" in text


@pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")
@pytest.mark.parametrize("module", ["torch.testing._internal.distributed.fake_pg"])
def test_a_module_that_is_missing_is_named_with_the_version(monkeypatch, capsys, module):
    monkeypatch.setitem(sys.modules, module, None)
    for name in ("fsdp", "ranks"):
        monkeypatch.delitem(sys.modules, f"stepscope.planner.emulation.{name}", raising=False)

    assert f"torch {torch.__version__} lacks a part that plans use" in said(capsys, "--fsdp", "2")


def test_a_mistake_of_the_program_is_its_own(tmp_path, capsys):
    path = tmp_path / "own.py"
    path.write_text("import torch\n\ndef build():\n    return torch.nn.Nothing(), lambda: torch.ones(1)\n")

    assert main(["plan", f"{path}:build"]) == 2
    assert "own.py, line 4: AttributeError" in capsys.readouterr().err
