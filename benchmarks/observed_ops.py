"""Runs every op of torch's own op database with and without the ledger, and prints where results or gradients differ.

    python benchmarks/observed_ops.py [--device cuda] [--samples 6] [OP...]        needs: pip install expecttest

Some ops of torch take another path while a dispatch mode is active (docs/measurement.md lists those found).
"""

import argparse
import itertools
import sys
import warnings

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

from stepscope.recorder.ledger.ledger import Ledger

UNDEFINED = ("empty", "resize")  # ops whose results are whatever the memory held


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", type=int, default=6)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    num = num_different = 0
    for op in op_db:
        if (asked.ops and op.name not in asked.ops) or any(word in op.name for word in UNDEFINED):
            continue
        dtype = torch.float32 if torch.float32 in op.dtypes else torch.int64
        needs_grad = op.supports_autograd and dtype == torch.float32
        try:
            samples = list(itertools.islice(op.sample_inputs(asked.device, dtype, needs_grad), asked.samples))
        except Exception as error:  # not every op runs on every machine
            print(f"skipped  {op.name}: {type(error).__name__}: {str(error)[:80]}")
            continue
        for number, sample in enumerate(samples):
            num += 1
            if (apart := difference(outcome(op, sample, False), outcome(op, sample, True))) is not None:
                num_different += 1
                print(f"differs  {op.name} {op.variant_test_name} sample {number}: {apart}")
    print(f"{num_different} of {num} samples differ")
    return num_different > 0


def outcome(op, sample, is_observed):
    """Return results and gradients, or the exception."""
    torch.manual_seed(0)
    args, kwargs = tree_map(cloned, ((sample.input, *sample.args), sample.kwargs))
    ledger = Ledger([], [], lambda: None) if is_observed else None
    if ledger is not None:
        ledger.start()
    try:
        results = tensors(op.op(*args, **kwargs))
        outputs = [each for each in results if each.requires_grad]
        inputs = [each for each in tensors((args, kwargs)) if each.requires_grad]
        if outputs and inputs:
            found = torch.autograd.grad(outputs, inputs, list(map(torch.ones_like, outputs)), allow_unused=True)
            results += tensors(found)
        return results
    except Exception as error:
        return error
    finally:
        if ledger is not None:
            ledger.stop()


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def cloned(value):
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def difference(bare, observed):
    if isinstance(bare, Exception) or isinstance(observed, Exception):
        same = type(bare) is type(observed) and str(bare) == str(observed)
        return None if same else f"{bare!r:.120} | {observed!r:.200}"
    if len(bare) != len(observed):
        return f"{len(bare)} results | {len(observed)}"
    for one, other in zip(bare, observed):
        if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
            return f"{one.dtype} {tuple(one.shape)} | {other.dtype} {tuple(other.shape)}"
        if one.layout == torch.strided and not torch.equal(*map(bits, (one, other))):
            return f"values of {one.dtype} {tuple(one.shape)}"
    return None


def bits(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).view(-1)
    return (torch.view_as_real(plain) if plain.is_complex() else plain).view(torch.uint8)


if __name__ == "__main__":
    sys.exit(main())
