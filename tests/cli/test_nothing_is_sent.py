"""No command connects anywhere unless it is told to."""

from __future__ import annotations

SCRIPT = """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(12):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

# The events of Python itself, so a library that is used counts too. A path is a socket on this machine.
ALONE = """
import sys

def refuse(event, given):
    if event == "socket.getaddrinfo" or (event == "socket.connect" and not isinstance(given[1], (str, bytes))):
        print("CONNECTS:", event, given, file=sys.stderr)
        raise OSError(event)

sys.addaudithook(refuse)
from stepscope.cli.main import main
for words in sys.argv[1:]:
    try:
        code = main(words.split())
    except SystemExit as end:
        code = end.code
    assert not code, (words, code)
"""


def test_a_script_is_measured_and_its_page_written_without_a_connection(forks, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "alone.py").write_text(ALONE)
    commands = (
        "run --quiet --warmup 2 --clean 4 -o run train.py",
        "show run",
        "diagnose run",
        "report run -o page.html",
    )

    exit_code, _, complained = forks.run(["alone.py", *commands], tmp_path, {})

    assert exit_code == 0 and "CONNECTS" not in complained, complained
    assert (tmp_path / "page.html").is_file()
