"""The JSON object around a trace's list of events: its other fields, read while streaming."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepscope.errors import TraceError
from stepscope.trace.scan import is_incomplete, may_go_on, skip_blank, sound_text, value_at

LARGEST_HEADER = 1 << 23  # bytes examined before the first event, and after the last
_BYTE_ORDER_MARK = "\xef\xbb\xbf"
_OTHER_FORMATS = {
    **dict.fromkeys(("\xff\xfe", "\xfe\xff", "{\0", "[\0"), "is UTF-16: a trace is UTF-8"),
    "PK\x03\x04": "is a zip archive (like files of torch.save): unpack it first if it contains a trace",
    "BZh": "is compressed with bzip2: decompress it with bunzip2",
    "\xfd7zXZ\0": "is compressed with xz: decompress it with unxz",
    "(\xb5/\xfd": "is compressed with Zstandard: decompress it with unzstd",
    "\x1f\x8b": "is compressed twice with gzip: decompress it with gunzip",
    "SQLite format 3": "is a compressed SQLite database: decompress it with gunzip",
    "NVIDIA Tegra Profiler": "is a report of Nsight Systems: export it with `nsys export --type sqlite`",
}
"""Files mistaken for traces, by their beginning."""
_LONGEST_BEGINNING = max(map(len, _OTHER_FORMATS))


class Fields:
    """A cursor over the text before or after the events. A character is a byte."""

    def __init__(self, path: Path, read: Callable[[], bytes], text: bytes = b"", base: int = 0) -> None:
        self._path = path
        self._read = read
        self._text = text.decode("latin-1")
        self._base = base
        self._position = 0

    @property
    def offset(self) -> int:
        return self._base + self._position

    def rest(self) -> tuple[int, bytes]:
        """Return the offset after the cursor, and the data read so far from there."""
        return self.offset, self._text[self._position :].encode("latin-1")

    def open(self) -> bool:
        """Enter the outermost value; return True for an object, False for a list."""
        while len(self._text) < _LONGEST_BEGINNING and self._read_on():
            pass
        for beginning, what in _OTHER_FORMATS.items():
            if self._text.startswith(beginning):
                raise self.error(what)
        if self._text.startswith(_BYTE_ORDER_MARK):
            self._position = len(_BYTE_ORDER_MARK)
        first = self.peek()
        if not first:
            raise self.error("has only white space" if self.offset else "is empty")
        if first not in "{[":
            raise self.error(f"is not a trace: expected {{ or [, found {first!r}")
        self._position += 1
        return first == "{"

    def read(self, into: dict[str, Any]) -> bool:
        """Read fields up to the list of events (return True) or the end of the object (False)."""
        while True:
            if self.peek() == ",":
                self._position += 1
            if self.peek() == "}":
                self._position += 1
                return False
            self._expect('"', "a name in quotes")
            key = self._value()
            self._expect(":", "a colon")
            self._position += 1
            if self.peek() == "[" and key == "traceEvents":
                self._position += 1
                return True
            into[key] = self._value()

    def peek(self) -> str:
        """Return the next character that is not white space, without moving past it; empty at the end of the file."""
        while True:
            self._position = skip_blank(self._text, self._position)
            if self._position < len(self._text):
                return self._text[self._position]
            if not self._read_on():
                return ""

    def _expect(self, character: str, name: str) -> None:
        if self.peek() != character:
            raise self.error(f"is not a trace: expected {name}" if self.peek() else _ENDS)

    def error(self, what: str) -> TraceError:
        return TraceError(f"{self._path} {what} (byte {self.offset:,})")

    def _value(self) -> Any:
        while True:
            try:
                value, end = value_at(self._text, self._position)
            except ValueError as error:
                if is_incomplete(error, self._text):
                    if self._read_on():
                        continue
                    raise self.error(_ENDS) from None
                self._position = getattr(error, "pos", self._position)
                text = str(getattr(error, "msg", error))
                raise self.error(f"is not a trace: {text[0].lower()}{text[1:]}") from None
            if may_go_on(self._text, end) and self._read_on():
                continue
            written = self._text[self._position : end]
            if not written.isascii():
                value, _ = value_at(written.encode("latin-1").decode("utf-8", errors="replace"), 0)
            self._position = end
            try:
                return _sound(value)
            except RecursionError:
                return None

    def _read_on(self) -> bool:
        """Read more of the file; return False at its end."""
        self._base += self._position  # release what has been read
        self._text, self._position = self._text[self._position :], 0
        num_wanted = max(1, len(self._text))  # double each time, so that a value is not read again too often
        more = b""
        while len(more) < num_wanted and (data := self._read()):
            more += data
        if self._text and len(self._text) + len(more) > LARGEST_HEADER:
            raise self.error(f"has more than {LARGEST_HEADER >> 20} MiB in a field outside its events")
        self._text += more.decode("latin-1")
        return bool(more)


_ENDS = "ends before its first event"


def _sound(value: Any) -> Any:
    """Return the value with texts that can be encoded."""
    if isinstance(value, dict):
        return {sound_text(key): _sound(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_sound(item) for item in value]
    return sound_text(value) if type(value) is str else value
