"""Decodes the pickles of PyTorch's C++ code without Python's unpickler: plain values, and nothing else.

A pickle is a program. This reads the dozen opcodes that create dicts, lists, texts and numbers, and refuses all
others: there is no opcode left that could name or call anything. Names in a dict must be texts, so that no crafted
number or tuple is ever hashed; tuples become lists.
"""

import pickletools
import struct
from typing import Any

MAX_TEXT_BYTES = 1 << 20
_TEXTS = {ord("X"): 4, 0x8C: 1}  # opcode: bytes of the length
_NUMBERS = {ord("K"): "<B", ord("M"): "<H", ord("J"): "<i", ord("G"): ">d"}
_CONSTANTS = {ord("N"): None, 0x88: True, 0x89: False}
_GETS = {ord("h"): 1, ord("j"): 4}
_PUTS = {ord("q"): 1, ord("r"): 4}
_TUPLES = {ord(")"): 0, 0x85: 1, 0x86: 2, 0x87: 3}


def decoded(data: bytes) -> Any:
    """Return the value of a pickle of protocol 2; ValueError if it is damaged or contains more than plain values.

    >>> import pickle
    >>> decoded(pickle.dumps({"group": ("0", "default"), "sizes": [[8, 2]]}, protocol=2))
    {'group': ['0', 'default'], 'sizes': [[8, 2]]}
    """
    if data[:2] != b"\x80\x02":
        raise ValueError("it does not start like a pickle of protocol 2")
    try:
        return _run(data)
    except (IndexError, struct.error):
        raise ValueError(f"its pickle is damaged or ends at byte {len(data):,} too early") from None
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise ValueError(f"its pickle is damaged ({type(error).__name__})") from None
    except MemoryError:
        raise ValueError("it needs more memory than available") from None


def _run(data: bytes) -> Any:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    place, left = 2, 1000 + len(data) // 4  # lists and dicts: a byte of the file must not take 60 of memory
    while True:
        code = data[place]
        place += 1
        if code in _GETS:
            end = place + _GETS[code]
            stack.append(memo[int.from_bytes(data[place:end], "little")])
            place = end
        elif code in _TEXTS:
            start = place + _TEXTS[code]
            length = int.from_bytes(data[place:start], "little")
            place = start + length
            if length > MAX_TEXT_BYTES or place > len(data):
                raise ValueError(f"a text at byte {start:,} claims {length:,} bytes: the file is cut off or damaged")
            stack.append(data[start:place].decode())
        elif code in _PUTS:
            end = place + _PUTS[code]
            memo[int.from_bytes(data[place:end], "little")] = stack[-1]
            place = end
        elif code in _NUMBERS:
            (number,) = struct.unpack_from(_NUMBERS[code], data, place)
            place += struct.calcsize(_NUMBERS[code])
            stack.append(number)
        elif code == 0x8A:  # a long number
            end = place + 1 + data[place]
            if data[place] > 9 or end > len(data):
                raise ValueError(f"a number of {data[place]} bytes at byte {place:,}")
            stack.append(int.from_bytes(data[place + 1 : end], "little", signed=True))
            place = end
        elif code in _CONSTANTS:
            stack.append(_CONSTANTS[code])
        elif code in b"]}":
            left -= 1
            stack.append([] if code == ord("]") else {})
        elif code == ord("("):
            left -= 1
            marks.append(len(stack))
        elif code in _TUPLES:
            left -= 1
            start = len(stack) - _TUPLES[code]
            if start < 0:
                raise IndexError
            stack[start:] = [stack[start:]]
        elif code in b"asetu":
            start = len(stack) - (1 if code == ord("a") else 2) if code in b"as" else marks.pop()
            values = stack[start:]
            del stack[start:]
            if code == ord("t"):
                stack.append(values)
            elif code in b"su":
                _set_items(stack[-1], values)
            else:
                list.extend(stack[-1], values)
        elif code == ord("."):
            return stack.pop()
        else:
            names = {opcode.code: f"the opcode {opcode.name}" for opcode in pickletools.opcodes}
            what = names.get(chr(code), f"0x{code:02x}")
            raise ValueError(f"{what} at byte {place - 1:,} is not needed for plain values; nothing was executed")
        if left < 0:
            raise ValueError("it has more lists and dicts than a dump of its size")


def _set_items(target: dict[str, Any], values: list[Any]) -> None:
    names = values[::2]
    if len(values) % 2 or not all(type(name) is str for name in names):
        raise ValueError("a name in it is not a text")
    dict.update(target, zip(names, values[1::2]))
