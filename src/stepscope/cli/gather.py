"""Collect the recordings of a job that ran on several hosts into one.

Each host of a job writes its ranks to its own disk. Copy those folders to one machine, for example with rsync, and
name all of them: the result is a recording like that of one host, with every rank in it. Repeat it whenever you have
newer copies: what is there already is left alone. DIR may be one of the folders.

examples:
  stepscope gather node0/runs/job node1/runs/job -o runs/job
  stepscope gather node*/runs/train-slurm4711.0 -o runs/train
"""

import argparse
from pathlib import Path

from stepscope.cli.support.output import tell
from stepscope.formatting import plural, safe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folders", type=Path, nargs="+", metavar="FOLDER", help="what each host of the job recorded")
    add("-o", "--output", type=Path, required=True, metavar="DIR", help="folder for the whole recording")


def main(arguments: argparse.Namespace) -> int:
    from stepscope.session.gather import gather

    found = gather(arguments.folders, arguments.output)
    hosts = f" of {plural(len(found.hosts), 'host')}" if found.hosts else ""
    new = f"{plural(len(found.copied), 'rank')} copied" if found.copied else "nothing new"
    tell(f"stepscope: {safe(found.folder)} has {plural(len(found.ranks), 'rank')}{hosts}; {new}")
    if found.missing:
        shown = ", ".join(map(str, found.missing[:20])) + (", …" if len(found.missing) > 20 else "")
        tell(f"stepscope: no recording of rank {shown}: throughput will be of the others alone")
    return 0
