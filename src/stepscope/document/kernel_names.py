"""Kernel names short enough to read: without return types, namespaces and most template arguments."""

import re
from collections.abc import Sequence

from stepscope.formatting import alike, num_common, safe

_LONGEST_NAME = 1000
_CALLABLE = re.compile(r"(\w+?)(?:_kernel_cuda|_kernel_impl|_cuda|Functor)\b")
_WRAPPERS = {"AUnary", "BUnary", "Binary", "gpu_kernel_impl_nocast", "opmath_gpu", "CUDAFunctorOn"}
_NOISE = re.compile(
    r"\(anonymous namespace\)::|\{lambda.*?\}|^void |std::|at::native::|at::|c10::|cutlass::|::operator\(\)"
)


def short_name(name: str, most: int = 60) -> str:
    """Return a kernel's name without return type, namespaces, arguments and most of its template arguments.

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
    """Return what is before the template arguments, and these, split at the commas of the outermost level."""
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


def kernel_titles(names: Sequence[str]) -> list[str]:
    """Return short kernel names; if two become alike, with the first word in which they differ.

    >>> kernel_titles(["void f<MulFunctor<float>, 1>(int)", "void f<MulFunctor<float>, 2>(int)"])
    ['f[MulFunctor<float>] 1', 'f[MulFunctor<float>] 2']
    """
    whole = [safe(name, _LONGEST_NAME) for name in names]
    titles = [short_name(name, _LONGEST_NAME) for name in whole]
    for same in alike(titles, whole):
        differ = num_common([whole[place] for place in same])
        words = [_word_at(whole[place], differ) for place in same]
        for number, (place, word) in enumerate(zip(same, words), 1):
            titles[place] += f" {word}" if words.count(word) == 1 else f" ({number})"
    return titles


def _word_at(text: str, place: int) -> str:
    """Return the word at a place of a text, or the next one, cut to a few characters."""
    start = max((found.start() for found in re.finditer(r"\b\w", text[: place + 1])), default=place)
    word = re.search(r"\w+", text[start:])
    return word[0][:24] if word else ""
