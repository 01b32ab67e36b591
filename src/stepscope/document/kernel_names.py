"""Kernel names short enough to read: what is left when a compiler's decoration is taken off."""

from __future__ import annotations

import re

_CALLABLE = re.compile(r"(\w+?)(?:_kernel_cuda|_kernel_impl|_cuda|Functor)\b")
_WRAPPERS = {"AUnary", "BUnary", "Binary", "gpu_kernel_impl_nocast", "opmath_gpu", "CUDAFunctorOn"}
_NOISE = re.compile(
    r"\(anonymous namespace\)::|\{lambda.*?\}|^void |std::|at::native::|at::|c10::|cutlass::|::operator\(\)"
)


def short_name(name: str, most: int = 60) -> str:
    """A kernel's name without return type, namespaces, arguments and most of its template arguments.

    >>> short_name("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int)")
    'vectorized_elementwise_kernel[CUDAFunctor_add<float>]'
    >>> short_name("void at::native::unrolled_elementwise_kernel<at::native::BinaryFunctor<MulFunctor<float> > >()")
    'unrolled_elementwise_kernel[Mul]'
    >>> short_name("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_bias_TNT")
    'nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_bias_TNT'
    """
    head, inside = _template(name)
    head = _NOISE.sub("", head).split("(")[0].strip()
    parts = [_NOISE.sub("", part).strip() for part in inside]
    parts = [part for part in parts if part and not part.lstrip("-").isdigit() and part not in ("true", "false")]
    # What the kernel does is the first argument that is a name of something, not a size or a type of index.
    what = next(
        (part for part in parts if not re.fullmatch(r"(unsigned )?(int|long|float|double|bool|char).*", part)), ""
    )
    if "elementwise" in head:
        # An elementwise kernel is the function it applies; the functors around it are plumbing.
        what = next((word for word in _CALLABLE.findall(name) if word not in _WRAPPERS and word not in head), what)
    text = f"{head}[{what}]" if what and head != what else head or name
    return text if len(text) <= most else text[: most - 1] + "…"


def _template(name: str) -> tuple[str, list[str]]:
    """What stands before the template arguments, and these, split at the commas of the outermost level."""
    start = name.find("<")
    if start < 0:
        return name, []
    depth, parts, current = 0, [], ""
    for char in name[start:2000]:
        if char in "<({":
            depth += 1
            if depth == 1:
                continue
        elif char in ">)}":
            depth -= 1
            if depth == 0:
                break
        if char == "," and depth == 1:
            parts.append(current)
            current = ""
        else:
            current += char
    return name[:start], [*parts, current]
