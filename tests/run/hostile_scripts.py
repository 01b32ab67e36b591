"""Training scripts that do what no training script should, each in a few lines. `go()` trains and prints losses."""

PRELUDE = """
import os, sys, gc, copy, pickle, warnings, threading, signal, atexit, weakref, time, random
from tiny import *

def go(num_steps=14, model=model, optimizer=optimizer, call=None):
    for _ in range(num_steps):
        tokens = batch()
        loss = F.cross_entropy((call or model)(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item().hex(), flush=True)

def sgd(model): return torch.optim.SGD(model.parameters(), lr=0.1)
"""

# What PyTorch and Python offer for watching and replacing things.
WATCHES = {
    "global optimizer hooks": """
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
seen = []
register_optimizer_step_post_hook(lambda *_: seen.append("after"))
register_optimizer_step_pre_hook(lambda *_: seen.append("before"))
go()
print(seen)
""",
    "optimizer hooks that come and go inside a step": """
from torch.optim.optimizer import register_optimizer_step_post_hook
handles = []
def swap(optimizer, *_):
    while handles: handles.pop().remove()
    handles.append(optimizer.register_step_pre_hook(lambda *_: print("before")))
optimizer.register_step_post_hook(swap)
try: go()
except RuntimeError as error: print(error)
""",
    "module hooks that come and go": """
def once(module, args, out):
    handle.remove()
    print("once")
handle = model.register_forward_hook(once)
model.register_full_backward_hook(lambda *_: print("backward"))
torch.nn.modules.module.register_module_forward_pre_hook(lambda module, _: print(type(module).__name__))
go()
""",
    "tensors without a shape": """
ragged = [torch.ones(2, 3), torch.ones(1, 3)]
linear = torch.nn.Linear(3, 3)
own = sgd(linear)
for _ in range(14):
    out = linear(torch.nested.nested_tensor(ragged))
    loss = torch.nested.to_padded_tensor(out, 0.0).square().sum()
    loss.backward()
    own.step()
    own.zero_grad()
    print(loss.item().hex())
""",
    "a dispatch mode": """
from torch.utils._python_dispatch import TorchDispatchMode
class Log(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        print(func)
        return func(*args, **(kwargs or {}))
with Log(): go()
""",
    "a dispatch mode around the optimizer only": """
from torch.utils._python_dispatch import TorchDispatchMode
class Log(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        print(func)
        return func(*args, **(kwargs or {}))
for _ in range(14):
    loss_of(model, batch()).backward()
    with Log(): optimizer.step()
    optimizer.zero_grad()
print(torch.utils._python_dispatch._len_torch_dispatch_stack())
""",
    "a dispatch mode that ends inside the window": """
from torch.utils._python_dispatch import TorchDispatchMode
class Log(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        print(func)
        return func(*args, **(kwargs or {}))
for first in range(5, 9):
    go(first)
    mode = Log(); mode.__enter__()
    go(1)
    loss = loss_of(model, batch())
    mode.__exit__(None, None, None)
    loss.backward()
    print(torch.utils._python_dispatch._len_torch_dispatch_stack())
""",
    "a function mode": """
from torch.overrides import TorchFunctionMode
class Log(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        print(getattr(func, "__name__", func))
        return func(*args, **(kwargs or {}))
with Log(): go()
""",
    "a tensor subclass that reports what is read": """
class Shy(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        print(getattr(func, "__name__", func))
        return super().__torch_function__(func, types, args, kwargs or {})
go(call=lambda tokens: model(tokens.as_subclass(Shy)).as_subclass(torch.Tensor))
""",
    "a trace function": """
lines = []
def trace(frame, event, _):
    if frame.f_code.co_filename == __file__: lines.append(frame.f_code.co_name)
sys.settrace(trace)
go()
sys.settrace(None)
print(lines)
""",
    "garbage collection callbacks": """
seen = []
gc.callbacks.insert(0, lambda phase, info: seen.append(phase))
gc.callbacks.append(lambda phase, info: seen.append(info["generation"]))
go(8); seen.clear(); gc.collect(); print(seen); go(8)
print(len([one for one in gc.callbacks if "<lambda>" in repr(one)]))
""",
    "a collection at every allocation": "gc.set_threshold(1, 1, 1)\ngo()",
    "no garbage collection": "gc.disable(); gc.freeze()\ngo()\nprint(gc.isenabled())",
    "saved tensor hooks": """
with torch.autograd.graph.saved_tensors_hooks(lambda t: (print(t.shape), t)[1], lambda t: t): go()
""",
    "anomaly mode": "with torch.autograd.set_detect_anomaly(True): go()",
    "warnings that are shown once": """
warnings.showwarning = lambda message, *_: print(message)
def warn(): warnings.warn("only once")
for _ in range(14):
    warn(); go(1)
    F.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 4)] * 3)
print(len(warnings.filters) > 0)
""",
    "warnings that are errors": "warnings.simplefilter('error')\ngo()",
    "its own profiler": """
with torch.profiler.profile() as profiler: go()
counts = {event.key: event.count for event in profiler.key_averages()}
print(counts["aten::embedding"], counts["Optimizer.step#SGD.step"])
""",
    "its own memory of allocations": """
import tracemalloc
tracemalloc.start()
go()
print(tracemalloc.is_tracing())
""",
}

# Classes and values that raise, lie, or never end.
LIES = {
    "parameters() raises": """
class Shut(Model):
    def parameters(self, recurse=True): raise RuntimeError("mine")
go(model=(shut := Shut()), optimizer=torch.optim.SGD(list(nn.Module.parameters(shut)), lr=0.1))
""",
    "parameters() draws and prints": """
class Loud(Model):
    def parameters(self, recurse=True):
        print("parameters()", float(torch.rand(1)))
        return super().parameters(recurse)
    def named_modules(self, *given, **named): print("named_modules()"); return super().named_modules(*given, **named)
go(model=(loud := Loud()), optimizer=sgd(loud))
""",
    "a table of modules that raises": """
class Shut(dict):
    def items(self): raise RuntimeError("mine")
parameters = list(model.parameters())
model._modules = Shut(model._modules)
go(optimizer=torch.optim.SGD(parameters, lr=0.1))
""",
    "parameters whose functions draw": """
class Drawing(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass(): torch.rand(1)
        return super().__torch_function__(function, types, args, kwargs or {})
model.head.weight = nn.Parameter(model.head.weight.detach().as_subclass(Drawing))
go(optimizer=sgd(model))
""",
    "losses whose ops draw": """
from torch.utils._pytree import tree_map
class Noisy(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        kinds = {"dtype": inner.dtype, "requires_grad": inner.requires_grad}
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, **kinds)
    def __init__(self, inner): self.inner = inner
    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        bare = lambda value: value.inner if isinstance(value, Noisy) else value
        is_float = lambda value: isinstance(value, torch.Tensor) and value.is_floating_point()
        result = function(*tree_map(bare, args), **tree_map(bare, kwargs or {}))
        return tree_map(lambda one: Noisy(one + 1e-3 * torch.rand_like(one)) if is_float(one) else one, result)
weight = Noisy(torch.randn(4, 4)).requires_grad_()
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(14):
    loss = (weight * weight).sum(); loss.backward(); optimizer.step(); optimizer.zero_grad()
    print(loss.inner.item().hex())
""",
    "os.getpid is replaced": """
def no(): raise RuntimeError("mine")
go(6)
os.getpid = no
print("done")
""",
    "a thread that trains after the script": """
threading.Thread(target=lambda: (time.sleep(0.2), go(12), print("done"))).start()
print("first")
""",
    "a pool whose workers wait": """
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(2)
print(pool.submit(lambda: 1).result())
go()
""",
    "named_modules() and children() raise": """
class Shut(Model):
    def modules(self): raise RuntimeError("mine")
    def named_children(self): raise RuntimeError("mine")
go(model=(shut := Shut()), optimizer=sgd(shut))
""",
    "a module that contains itself": """
model.children_of_mine = nn.ModuleList([model])
print(len(list(model.modules())))
go()
""",
    "a module that equals everything and has no hash": """
class Equal(Model):
    def __eq__(self, other): return True
    __hash__ = None
Equal.__hash__ = lambda self: 7
go(model=(one := Equal()), optimizer=sgd(one))
""",
    "__getattr__ that answers everything": """
class Yes(Model):
    def __getattr__(self, name):
        try: return super().__getattr__(name)
        except AttributeError: return lambda *_, **__: print("asked for", name)
go(model=(yes := Yes()), optimizer=sgd(yes))
""",
    "__slots__ and __del__": """
class Slots(Model):
    __slots__ = ("other",)
    def __del__(self): print("gone")
one = Slots(); go(model=one, optimizer=sgd(one)); del one; gc.collect(); print("end")
""",
    "__class__ that lies": """
class Liar(Model):
    @property
    def __class__(self): return int
go(model=(liar := Liar()), optimizer=sgd(liar))
""",
    "arguments nested without end": """
deep = []
for _ in range(5000): deep = [deep]
loop = []; loop += [loop, loop, {"a": loop}]
class Takes(Model):
    def forward(self, tokens, *_, **__): return super().forward(tokens)
takes = Takes()
for extra in (deep, loop, [0] * 3_000_000):
    go(9, model=takes, optimizer=sgd(takes), call=lambda tokens: takes(tokens, extra, more=extra))
""",
    "containers that raise": """
class Bad(dict):
    def values(self): raise RuntimeError("mine")
    items = get = keys = __iter__ = __getitem__ = values
class Worse(list):
    def __iter__(self): raise RuntimeError("mine")
    __len__ = __getitem__ = __iter__
class Takes(Model):
    def forward(self, first, tokens, **_): return super().forward(tokens)
takes = Takes()
for first in (Bad(input_ids=1), Worse([1]), (Worse([2]),)):
    go(9, model=takes, optimizer=sgd(takes), call=lambda tokens: takes(first, tokens, last=first))
""",
    "values that raise when they are compared or shown": """
class Sour:
    def __eq__(self, other): raise RuntimeError("mine")
    __repr__ = __str__ = __bool__ = __hash__ = __len__ = lambda self: 1 / 0
class Takes(Model):
    def forward(self, sour, tokens): return super().forward(tokens)
takes = Takes()
go(model=takes, optimizer=sgd(takes), call=lambda tokens: takes(Sour(), tokens))
""",
    "an optimizer with an odd step": """
class Odd(torch.optim.SGD):
    def step(self, *, why="because", closure=None):
        super().step()
        return why
class Other(torch.optim.Optimizer):
    def __init__(self, parameters): super().__init__(parameters, {})
    def step(self, a=1, b=2):
        with torch.no_grad():
            for p in self.param_groups[0]["params"]: p -= 0.1 * p.grad
        return a + b
odd = Odd(model.parameters(), lr=0.1)
for _ in range(9):
    loss_of(model, batch()).backward(); print(odd.step(why="so")); odd.zero_grad()
other = Other(model.parameters())
for _ in range(9):
    loss_of(model, batch()).backward(); print(other.step(3)); other.zero_grad()
go()
""",
    "an optimizer without parameter groups": """
class Bare(torch.optim.SGD):
    @property
    def param_groups(self): raise AttributeError("mine") if self.__dict__.get("shut") else None
    @param_groups.setter
    def param_groups(self, value): pass
class Duck:
    def step(self):
        with torch.no_grad():
            for p in model.parameters(): p -= 0.1 * p.grad
    def zero_grad(self): model.zero_grad()
go(optimizer=Duck())
try: Bare(model.parameters(), lr=0.1)
except Exception as error: print(type(error).__name__)
go(optimizer=Duck())
""",
    "a loss of another kind": """
one = torch.ones(1, 1, requires_grad=True)
for loss in (one.sum(), one, one.to(torch.complex64).real):
    (loss * 1).backward(); go(5)
try: (torch.ones(2, requires_grad=True) * 1).backward()
except RuntimeError as error: print(error)
try: torch.autograd.backward(None)
except Exception as error: print(type(error).__name__, error)
go()
""",
    "closures": """
for _ in range(14):
    tokens = batch()
    def closure():
        optimizer.zero_grad(); loss = loss_of(model, tokens); loss.backward(); return loss
    print(optimizer.step(closure).item().hex())
lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=3)
for _ in range(5): print(lbfgs.step(closure).item().hex())
""",
    "errors inside everything that is hooked": """
from torch.utils.data import DataLoader
class Data:
    def __len__(self): return 4
    def __getitem__(self, i): raise KeyError(i)
class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, g): raise ArithmeticError("mine")
class Stuck(torch.optim.SGD):
    def step(self, closure=None): raise LookupError("mine")
def tries(what):
    try: what()
    except Exception as error: print(type(error).__name__, error, error.__cause__, error.__context__)
for _ in range(12):
    tries(lambda: next(iter(DataLoader(Data()))))
    tries(lambda: model("not tokens"))
    tries(lambda: Breaks.apply(loss_of(model, batch())).backward())
    tries(Stuck(model.parameters(), lr=0.1).step)
    tries(lambda: torch.save(1, "no/such/folder"))
    go(1)
""",
}

# What a script does to its process and to itself.
PROCESS = {
    "modules deleted from sys.modules": """
removed = ("json", "logging", "stepscope", "contextlib")
for name in [name for name in sys.modules if name.startswith(removed)]: del sys.modules[name]
go()
""",
    "PyTorch with other functions": """
backward, call = torch.Tensor.backward, nn.Module.__call__
torch.Tensor.backward = lambda self, *a, **k: (print("backward"), backward(self, *a, **k))[1]
nn.Module.__call__ = lambda self, *a, **k: (print(type(self).__name__), call(self, *a, **k))[1]
autograd = torch.autograd.backward
go(9)
torch.autograd.backward = lambda *a, **k: (print("engine"), autograd(*a, **k))[1]
go(9)
torch.autograd.backward = autograd
go(9)
""",
    "standard output and error replaced": """
import io
sys.stdout, sys.stderr, real = io.StringIO(), io.StringIO(), sys.stdout
go()
said, sys.stdout = (sys.stdout.getvalue(), sys.stderr.getvalue()), real
print(said)
""",
    "standard error that raises": """
class Closed:
    def write(self, text): raise OSError("mine")
    flush = write
sys.stderr = Closed()
go()
""",
    "closed descriptors": """
os.closerange(3, 1000)
mine = [open(f"mine{number}", "w") for number in range(260)]
go(30)
for each in mine: each.write("mine"); each.close()
print({open(f"mine{number}").read() for number in range(260)})
""",
    "standard error closed and reused": """
go(3)
os.close(2)
mine = open("mine", "w")
print(mine.fileno())
go()
mine.close()
print(open("mine").read())
""",
    "few open files": """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (40, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
go()
""",
    "small files": """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
go(30)
""",
    "another folder": "os.mkdir('there'); os.chdir('there')\ngo()\nopen('mine', 'w').close()\nprint(os.listdir())",
    "the recording removed": """
import shutil
go(4); shutil.rmtree("recording", ignore_errors=True); go()
""",
    "a low recursion limit": """
go(3)
sys.setrecursionlimit(130)
go()
""",
    "its own recursion": """
def dive(n):
    try: return dive(n + 1)
    except RecursionError:
        return n > 100
for _ in range(9): print(dive(0)); go(1)
""",
    "signals that raise": """
class Late(Exception): pass
def ring(*_): raise Late
signal.signal(signal.SIGALRM, ring)
caught = 0
torch.manual_seed(1)
tokens = batch()
start = time.monotonic()
while caught < 40 and time.monotonic() - start < 20:
    signal.setitimer(signal.ITIMER_REAL, 0.0002 + 0.0001 * (caught % 17))
    try:
        while True: loss_of(model, tokens)
    except Late: caught += 1
print(caught)
""",
    "atexit, in order": """
atexit.register(print, "first")
go()
atexit.register(lambda: go(2))
atexit.register(print, "last")
""",
    "a thread that trains": """
threads = [threading.Thread(target=go, args=(9,)) for _ in range(3)]
for each in threads: each.start(); each.join()
go()
""",
    "a thread that raises": """
def fail(): 1 / 0
import traceback
threading.excepthook = lambda args: print([f.f_code.co_name for f, _ in traceback.walk_tb(args.exc_traceback)])
for _ in range(9):
    thread = threading.Thread(target=fail); thread.start(); thread.join(); go(1)
""",
    "asyncio": """
import asyncio
async def main():
    for _ in range(14):
        go(1); await asyncio.sleep(0)
asyncio.run(main())
""",
    "forks that train and leave": """
for code in (0, 3):
    go(5)
    if not (pid := os.fork()):
        go(3); sys.stdout.flush(); os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
go()
""",
    "os._exit": "go()\nos._exit(9)",
    "sys.exit in a hook": """
calls = []
model.register_forward_hook(lambda *_: sys.exit(4) if calls.append(1) or len(calls) > 12 else None)
go()
""",
    "sys.exit in an optimizer hook, caught": """
optimizer.register_step_post_hook(lambda *_: sys.exit(5))
for _ in range(12):
    try: go(1)
    except SystemExit as error: print(error.code)
""",
    "KeyboardInterrupt in the backward": """
class Stops(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, g): raise KeyboardInterrupt
for _ in range(12):
    try: Stops.apply(loss_of(model, batch())).backward()
    except KeyboardInterrupt: print("caught")
    go(1)
""",
    "an exception that causes itself": """
go()
first, second = ValueError("first"), KeyError("second")
first.__cause__, second.__cause__ = second, first
sys.excepthook = lambda kind, value, frames: print(kind.__name__, value)
raise first
""",
    "an exception group": """
go()
sys.excepthook = lambda kind, value, frames: print(kind.__name__, value.exceptions)
raise ExceptionGroup("mine", [ValueError(1), KeyError(2)])
""",
    "an exception whose message raises": """
class Mute(Exception):
    def __str__(self): raise RuntimeError("mine")
go()
sys.excepthook = lambda kind, value, frames: print(kind.__name__)
raise Mute
""",
}

# What a script does with its model.
MODELS = {
    "copies in the middle of training": """
for step in range(16):
    go(1)
    other, third = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    mine = copy.deepcopy(optimizer); pickle.dumps(optimizer)
    print(sorted(other.__dict__) == sorted(Model().__dict__), sorted(model.state_dict()), len(mine.param_groups))
    with torch.no_grad(): print([each(torch.zeros(1, 2, dtype=torch.long)).sum().item() for each in (other, third)])
""",
    "a clone by hand": """
for step in range(16):
    clone = model.__new__(type(model)); clone.__dict__ = model.__dict__.copy()
    clone._modules = {name: copy.deepcopy(part) for name, part in model._modules.items()}
    with torch.no_grad():
        for parameter in clone.parameters(): parameter.zero_()
        print(clone(torch.zeros(1, 2, dtype=torch.long)).abs().sum().item())
    go(1)
original = Model(); go(10, model=original, optimizer=sgd(original))
clone = original.__new__(type(original)); clone.__dict__ = original.__dict__.copy()
del original; gc.collect()
go(9, model=clone, optimizer=sgd(clone))
""",
    "models that are released": """
dead = []
for number in range(8):
    one = Model(); made = sgd(one)
    dead += [weakref.ref(one), weakref.ref(made), weakref.ref(one.head.weight)]
    go(6, model=one, optimizer=made)
    del one, made
    gc.collect()
    print(sum(each() is not None for each in dead))
""",
    "a released batch": """
go(8)
for _ in range(8):
    tokens = batch(); gone = weakref.ref(tokens)
    loss = loss_of(model, tokens); loss.backward(); optimizer.step(); optimizer.zero_grad()
    graph = weakref.ref(loss)
    del tokens, loss
    print(gone() is None, graph() is None)
""",
    "TorchScript": """
go(5)
scripted = torch.jit.script(model)
traced = torch.jit.trace(model, (batch(),))
go(9, model=scripted, optimizer=sgd(scripted)); go(9, model=traced, optimizer=sgd(traced))
print(scripted.code)
""",
    "torch.func": """
from torch.func import functional_call, grad, vmap, stack_module_state
weights = dict(model.named_parameters())
for _ in range(14):
    tokens = batch()
    def loss(w): return F.cross_entropy(functional_call(model, w, (tokens,)).flatten(0, 1), tokens.flatten())
    gradients = grad(loss)(weights)
    weights = {name: (value - 0.1 * gradients[name]).detach() for name, value in weights.items()}
    print(weights["head.weight"].sum().item().hex())
go()
""",
    "random numbers of every kind": """
random.seed(1)
generator = torch.Generator().manual_seed(3)
for _ in range(14):
    go(1)
    print(random.random(), torch.rand(1).item(), torch.rand(1, generator=generator).item())
    print(torch.get_rng_state().sum().item())
""",
    "other defaults": """
torch.set_default_dtype(torch.float64)
torch.set_default_device("cpu")
torch.use_deterministic_algorithms(True)
double = Model(); go(model=double, optimizer=sgd(double))
print(torch.get_default_dtype(), torch.get_default_device(), torch.are_deterministic_algorithms_enabled())
""",
    "inference mode and no gradients": """
for step in range(14):
    with torch.inference_mode(): print(model(batch()).sum().item().hex())
    go(1)
""",
    "a model that changes its class and its layers": """
class Other(Model):
    def forward(self, tokens): return super().forward(tokens) * 2
go(7); model.__class__ = Other; go(7)
model.head = nn.Linear(8, 16); go(7, optimizer=sgd(model))
del model.embedding; model.embedding = nn.Embedding(16, 8); go(7, optimizer=sgd(model))
""",
    "a forward set on the instance": """
forward = model.forward
model.forward = lambda tokens: forward(tokens) * 0.5
go(9); model.forward = forward; go(9)
model.__call__ = None
go(3)
""",
    "checkpoints of everything": """
for step in range(16):
    go(1)
    torch.save({"model": model, "optimizer": optimizer, "state": optimizer.state_dict()}, f"checkpoint{step}.pt")
model.load_state_dict(torch.load("checkpoint15.pt", weights_only=False)["model"].state_dict()); go(3)
""",
    "gradients of gradients": """
for _ in range(14):
    loss = loss_of(model, batch())
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + sum(g.square().sum() for g in gradients)).backward()
    optimizer.step(); optimizer.zero_grad(); print(loss.item().hex())
""",
    "reentrant and other checkpoints": """
from torch.utils.checkpoint import checkpoint
for reentrant in (True, False):
    go(12, call=lambda tokens: model.head(checkpoint(model.embedding, tokens, use_reentrant=reentrant)))
""",
    "generators for parameters": """
for _ in range(3):
    one = Model(); made = torch.optim.Adam(p for p in one.parameters()); go(6, model=one, optimizer=made)
""",
    "optimizers whose groups change": """
for step in range(14):
    go(1)
    extra = nn.Parameter(torch.ones(1)); optimizer.add_param_group({"params": [extra]})
    if step == 9: optimizer.param_groups[0]["params"] = []
""",
}

SCRIPTS = WATCHES | LIES | PROCESS | MODELS
