"""Serve recordings and traces to a coding agent, over the Model Context Protocol on standard input and output.

The agent can list runs, analyze, diagnose and compare them, query them with SQL, and plan a model. It reads only what
is in FOLDER. With --allow-run it can also run scripts of the folder: run, verify, improve, bench. An agent that has
only a shell can read --skill instead, which needs no server.

Needs the MCP SDK: pip install 'stepscope[mcp]'. See docs/agents.md for the setup of common agents.

examples:
  stepscope mcp
  stepscope mcp ~/my-project --allow-run
  stepscope mcp --skill
"""

import argparse
from pathlib import Path

from stepscope.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, nargs="?", default=Path(), metavar="FOLDER", help="what it may read (default: here)")
    add("--allow-run", action="store_true", help="also offer tools that run code in the folder")
    add("--skill", action="store_true", help="print instructions for an agent with a shell, and exit")


def main(arguments: argparse.Namespace) -> int:
    from stepscope.integrations.agents import server

    if arguments.skill:
        from stepscope.cli.support.output import write

        write([Path(server.__file__).with_name("SKILL.md").read_text(encoding="utf-8")])
        return 0
    if not arguments.folder.is_dir():
        raise UsageError(f"{arguments.folder} is not a folder")
    server.serve(arguments.folder, arguments.allow_run)
    return 0
