"""A script under `stepscope run` is the script: what it sees, what it prints, how it ends."""

import json
import re
import signal
import time

import pytest

SHORT = ("--warmup", "2", "--clean", "3", "--trace", "1")
FACTS = """
import __main__, inspect, json, os, pickle, sys
from dataclasses import dataclass

@dataclass
class Point:
    x: int

def function(a: Point) -> int: ...

print(json.dumps({
    "argv": sys.argv,
    "path entry": sys.path[0],
    "working directory": os.getcwd(),
    "name": __name__,
    "file": __file__,
    "package": __package__,
    "spec": __spec__,
    "loader": type(__loader__).__name__,
    "names": sorted(set(vars(__main__)) - {"__annotations__"}),
    "pickle": repr(pickle.loads(pickle.dumps(Point(3)))),
    "annotations": str(function.__annotations__),
    "source": inspect.getsource(Point),
    "code": function.__code__.co_filename,
}))
"""

MODULE = """
import os, sys
from . import sibling
from .sibling import NAME
print(sys.argv, sys.path[0], os.getcwd())
print(__name__, __file__, __package__, __spec__.name, __spec__.parent, NAME)
"""

SEEDED = """
import os, random, sys
from tiny import *
from torch.utils.data import DataLoader

class Dropping(Model):
    def forward(self, tokens):
        return self.head(F.dropout(self.embedding(tokens), 0.5, self.training))

torch.manual_seed(1)
random.seed(2)
model = Dropping()
optimizer = torch.optim.Adam(model.parameters())
for step, tokens in enumerate(DataLoader(torch.randint(16, (24, 5)), batch_size=2, shuffle=True)):
    loss = loss_of(model, tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item().hex(), random.random())
sys.stdout.flush()
os.system("echo from a child")
print("to stderr", file=sys.stderr)
"""

RAISES_IN_BACKWARD = """
from tiny import *

class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("no gradient today")

for step in range(5):
    train_step()
Broken.apply(loss_of(model, batch())).backward()
"""

RAISES_CHAINED = """
from tiny import *

def fail():
    try:
        torch.zeros(2) @ torch.zeros(3)
    except RuntimeError as error:
        raise ValueError("two is not three") from error

for step in range(3):
    train_step()
try:
    fail()
except ValueError:
    {}["then"]
"""


@pytest.fixture(scope="module")
def seeded(lab):
    return lab.script(SEEDED)


@pytest.fixture(scope="module")
def bare(seeded, forks):
    return seeded.python_in_fork(forks, seeded.path.name)


@pytest.fixture(scope="module")
def facts(lab):
    script = lab.script(FACTS)
    words = ("one", "--quiet", "-o", "two", "-m", "three")
    bare, run = script.both(*words)
    assert run.exit_code == bare.exit_code == 0, run.stderr
    return json.loads(run.stdout), json.loads(bare.stdout)


@pytest.mark.parametrize("fact", re.findall(r'^    "(.*)":', FACTS, re.MULTILINE))
def test_a_script_sees_what_it_always_sees(facts, fact):
    under_stepscope, bare = facts
    assert under_stepscope[fact] == bare[fact]


def test_a_script_in_another_folder_has_that_folder_on_its_path(lab):
    script = lab.script()
    folder = script.folder / "deeper"
    folder.mkdir()
    (folder / "neighbor.py").write_text("NAME = 'neighbor'")
    (folder / "other.py").write_text("import os, sys, neighbor\nprint(sys.argv, sys.path[0], os.getcwd())")
    bare = script.python("deeper/other.py", "x")
    run = script.stepscope("run", "-o", "recording", "--quiet", "deeper/other.py", "x")
    assert (run.exit_code, run.stdout) == (0, bare.stdout)


@pytest.mark.parametrize(("module", "file"), [("package.train", "train.py"), ("package", "__main__.py")])
def test_a_module_sees_what_it_always_sees(lab, module, file):
    script = lab.script()
    package = script.folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sibling.py").write_text("NAME = __name__")
    (package / file).write_text(MODULE)
    bare = script.python("-m", module, "--lr", "3", "-m", "x")
    run = script.stepscope("run", "-o", "recording", "--quiet", "-m", module, "--lr", "3", "-m", "x")
    assert (run.exit_code, run.stdout) == (0, bare.stdout), run.stderr


@pytest.mark.parametrize(
    ("ending", "exit_code", "status"),
    [
        ("pass", 0, "finished"),
        ("sys.exit()", 0, "finished"),
        ("sys.exit(3)", 3, "failed"),
        ("sys.exit('the disk is full')", 1, "failed"),
        ("raise SystemExit(256 + 7)", 7, "failed"),
        ("1 / 0", 1, "failed"),
    ],
)
def test_exit_codes_messages_and_atexit_are_the_scripts(lab, ending, exit_code, status):
    script = lab.script(f"import atexit, sys\natexit.register(print, 'last words')\nprint('hello')\n{ending}\n")
    bare, run = script.both()
    assert run.exit_code == bare.exit_code == exit_code
    assert run.stdout == bare.stdout == "hello\nlast words\n"
    assert run.stderr == bare.stderr
    assert run.recording.status == status


HOLDER = """
import atexit, sys, weakref
from tiny import *

class Loader:
    pass

def train(ending):
    loader = Loader()
    atexit.register(lambda alive=weakref.ref(loader): print("alive", alive() is not None))
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(100):
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
        if step == 50:
            ending()

train({"exit": sys.exit, "none": int}[sys.argv[1]])
"""


@pytest.mark.parametrize("ending", ["exit", pytest.param("none", marks=pytest.mark.long)])
def test_what_a_function_held_is_gone_when_python_ends(lab, ending):
    """PyTorch waits for the workers of a DataLoader that is not, 5 s each."""
    run = lab.script(HOLDER).run(ending, options=("--exit-after", "--quiet", "--clean", 5, "--trace", 0))

    assert run.exit_code == 0 and "alive False" in run.stdout, run.stdout + run.stderr


@pytest.mark.parametrize(
    ("source", "num_steps"),
    [(RAISES_IN_BACKWARD, 5), pytest.param(RAISES_CHAINED, 3, marks=pytest.mark.long)],
    ids=["inside backward", "chained"],
)
def test_a_traceback_is_the_scripts_own(lab, forks, source, num_steps):
    script = lab.script(source)
    bare, run = script.python_in_fork(forks, str(script.path)), script.run_in_fork(forks, *SHORT, "--quiet")
    assert run.exit_code == bare.exit_code == 1
    assert _traceback(run) == _traceback(bare)
    assert run.recording.status == "failed"
    assert run.steps == list(range(num_steps))


@pytest.mark.long
def test_tracebacks_through_every_hook_are_the_scripts_own(lab):
    script = lab.script(
        """
        from tiny import *
        from torch.utils.data import DataLoader

        class Data:
            def __len__(self): return 4
            def __getitem__(self, index): raise LookupError(index)

        class Optimizer(torch.optim.SGD):
            def step(self, closure=None): raise ArithmeticError

        def read(): list(DataLoader(Data()))
        def forward(): model(torch.zeros(2, 5))

        for step in range(3):
            train_step()
        first = last = KeyError("the end of the chain")
        for call in (read, Optimizer(model.parameters()).step, forward):
            try:
                call()
            except Exception as error:
                last.__cause__ = error
                last = error
        raise first
        """
    )
    bare, run = script.both()
    assert _traceback(run) == _traceback(bare)


def test_the_scripts_own_excepthook_is_called_with_its_own_frames(lab):
    script = lab.script(
        """
        import sys, traceback
        def hook(kind, value, frames):
            print("hook", kind.__name__, value, [f.name for f in traceback.extract_tb(frames)])
        sys.excepthook = hook
        def inner(): raise ValueError("oh")
        inner()
        """
    )
    bare, run = script.both()
    assert run.stdout == bare.stdout == "hook ValueError oh ['<module>', 'inner']\n"
    assert (run.exit_code, run.stderr) == (1, "")


WAIT = "time.sleep(100)"
AS_LIGHTNING = """
        try:
            time.sleep(100)
        except KeyboardInterrupt:
            exit(1)
"""
AS_TORCHRUN = """
        from torch.distributed.elastic.multiprocessing.api import SignalException
        def ends(number, frame):
            raise SignalException("got signal", sigval=signal.Signals(number))
        signal.signal(signal.SIGINT, ends)
        print("ready", flush=True)
        time.sleep(100)
"""


@pytest.mark.parametrize(
    ("wait", "code", "last"),
    [
        (WAIT, -signal.SIGINT, "KeyboardInterrupt"),
        pytest.param(AS_LIGHTNING, 1, None, marks=pytest.mark.long),
        pytest.param(
            AS_TORCHRUN,
            1,
            "torch.distributed.elastic.multiprocessing.api.SignalException: got signal",
            marks=pytest.mark.long,
        ),
    ],
)
def test_ctrl_c_writes_what_there_is_and_ends_as_python_does(lab, wait, code, last):
    script = lab.script(
        f"""
        import signal, time
        from tiny import *
        for step in range(10):
            train_step()
        print("ready", flush=True)
        {wait}
        """
    )
    with script.popen("-m", "stepscope", "run", "-o", "recording", "--quiet", "train.py") as process:
        for _ in range(wait.count("ready") + 1):
            assert process.stdout.readline() == "ready\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == code
    assert last is None or stderr.splitlines()[-1] == last
    card = json.loads(script.verb("show", "recording", "--json").stdout)
    assert (card["status"], card["num_steps"]) == ("interrupted", 10)


def test_torch_is_imported_by_the_script_and_by_nobody_earlier(lab):
    run = lab.script(
        """
        import os, sys
        print("torch" in sys.modules, "numpy" in sys.modules)
        os.environ["OMP_NUM_THREADS"] = "1"
        import torch
        print(torch.get_num_threads(), torch.__spec__.origin == torch.__file__, type(torch.__loader__).__name__)
        """
    ).run(options=("--quiet",), OMP_NUM_THREADS="2")
    assert run.stdout == "False False\n1 True SourceFileLoader\n"


def test_losses_random_numbers_and_output_are_the_same(seeded, bare, forks):
    run = seeded.run_in_fork(forks, "--force")
    assert bare.exit_code == run.exit_code == 0, run.stderr
    assert run.stdout.startswith(bare.stdout)
    card = run.stdout.removeprefix(bare.stdout)
    assert card.startswith("\nA step takes ")
    assert card.count("Where a step goes") == 1
    assert "\x1b" not in card
    assert "stepscope: clean timing" in run.stderr
    assert run.steps == list(range(12))


@pytest.mark.long
def test_json_is_the_only_thing_on_standard_output(seeded, bare):
    run = seeded.run(options=("--force", "--json", "--warmup", "2", "--clean", "3", "--trace", "1"))
    assert run.stdout.count("\n") == 1
    card = json.loads(run.stdout)
    assert (card["status"], card["num_steps"], card["exit_code"]) == ("finished", 12, 0)
    assert set(bare.stdout.splitlines()) <= set(run.stderr.splitlines())


@pytest.mark.long
def test_quiet_says_nothing(seeded, bare):
    run = seeded.run(options=("--force", "--quiet", "--warmup", "2", "--clean", "3", "--trace", "1"))
    assert run.stdout == bare.stdout
    assert "stepscope" not in run.stderr
    assert (run.folder / "trace" / "rank0.json.gz").exists()


def _traceback(run) -> str:
    """What was printed from 'Traceback' on, but for which of its two ways into a call nn.Module took."""
    assert "Traceback" in run.stderr, run.stderr
    text = run.stderr[re.search(r"^.*Traceback", run.stderr, re.MULTILINE).start() :]
    way_in = r'(  File ".*/nn/modules/module.py", line )\d+(, in _wrapped_call_impl\n).*\n.*\^+\n'
    return re.sub(way_in, r"\1…\2", text)
