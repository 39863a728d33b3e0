"""Records out of a file: what it is packed in and how records are laid out in it.

Plain, gzip or xz; one JSON value a line, one JSON array of them, JSON values that take several
lines, or lines of CSV. It knows nothing of what a record means.
"""

import gzip
import io
import json
import lzma
import re
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import IO, cast

from pydantic_core import from_json

from hicache.errors import InputError

STDIN = "-"
HEAD_NBYTES = 1 << 16
MAX_VALUE_CHARS = 1 << 27
"""Of one value in an array: beyond it the array is taken for broken, not for large."""

MESSAGE_LIST = re.compile(rb'\s*\[\s*\{\s*"(role|content|from|value|name|tool_calls)"')
SPACE = re.compile(r"[\s,]*")


@dataclass(frozen=True, slots=True)
class Record:
    """One record, or why there is none."""

    line: int
    """Where it starts, from 1."""
    value: object
    """A JSON value; a ``str`` is a line of CSV."""
    error: str | None = None


class Source:
    """A trace file, by its path; or stdin, which can be read once."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self.name = "stdin" if str(path) == STDIN else str(path)
        self.is_stdin = str(path) == STDIN
        self._path = Path(path)
        self._is_used = False

    def records(self) -> Generator[Record]:
        """Give the records, one at a time; ``InputError`` where the file cannot be read."""
        if self.is_stdin and self._is_used:
            raise InputError("stdin: it can be read only once")
        self._is_used = True
        try:
            with self._opened() as stream:
                yield from _records(stream, self.name)
        except (OSError, EOFError, lzma.LZMAError) as error:
            what = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise InputError(f"{self.name}: {what}") from error

    @contextmanager
    def _opened(self) -> Iterator[io.BufferedReader]:
        raw = sys.stdin.buffer if self.is_stdin else self._path.open("rb")
        try:
            packed = io.BufferedReader(cast("io.RawIOBase", raw), HEAD_NBYTES)
            yield io.BufferedReader(cast("io.RawIOBase", _unpacked(packed)), HEAD_NBYTES)
        finally:
            if not self.is_stdin:
                raw.close()


def _unpacked(packed: "io.BufferedReader[io.RawIOBase]") -> IO[bytes]:
    head = packed.peek(6)
    if head.startswith(b"\x1f\x8b"):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=packed))
    if head.startswith(b"\xfd7zXZ\x00"):
        return cast("IO[bytes]", lzma.LZMAFile(packed))
    return packed


def _records(stream: io.BufferedReader, name: str) -> Iterator[Record]:
    head = stream.peek(HEAD_NBYTES).removeprefix(b"\xef\xbb\xbf")
    start = head.lstrip()
    if start.startswith(b"[") and not MESSAGE_LIST.match(head):
        return _values(stream, name, is_array=True)
    if re.match(rb"\{\s*\n", start):
        return _values(stream, name, is_array=False)
    if start.startswith((b"{", b"[")):
        return _lines(stream)
    return _csv_lines(stream)


def _lines(stream: io.BufferedReader) -> Iterator[Record]:
    for number, line in enumerate(stream, start=1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            continue
        try:
            yield Record(number, from_json(line, cache_strings="keys"))
        except ValueError as error:
            yield Record(number, None, f"is not JSON: {error}")


def _csv_lines(stream: io.BufferedReader) -> Iterator[Record]:
    for number, line in enumerate(stream, start=1):
        if line.strip():
            yield Record(number, line.decode("utf-8-sig", errors="replace").strip())


def _values(stream: io.BufferedReader, name: str, *, is_array: bool) -> Iterator[Record]:
    """Give JSON values that lie one behind the other, holding little more than one of them."""
    reader = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="replace")
    decoder = json.JSONDecoder()
    buffer, position, line, wanted = "", 0, 1, HEAD_NBYTES
    is_open = is_array
    while True:
        end = _after_space(buffer, position)
        if is_open and end < len(buffer):
            end, is_open = _after_space(buffer, end + 1), False
        line += buffer.count("\n", position, end)
        position = end
        try:
            if position == len(buffer):
                raise json.JSONDecodeError("more", buffer, position)
            if is_array and buffer[position] == "]":
                return
            value, end = decoder.raw_decode(buffer, position)
        except json.JSONDecodeError as error:
            more = reader.read(wanted) if len(buffer) - position < MAX_VALUE_CHARS else ""
            if not more and position == len(buffer) and not is_array:
                return
            if not more:
                what = f"{name}:{line}: is not JSON from here on"
                raise InputError(f"{what}: {error.msg}" if error.msg != "more" else what) from None
            buffer, position = buffer[position:] + more, 0
            wanted = max(HEAD_NBYTES, len(buffer))
            continue
        yield Record(line, value)
        line += buffer.count("\n", position, end)
        position = end


def _after_space(buffer: str, position: int) -> int:
    found = SPACE.match(buffer, position)
    assert found is not None  # it matches nothing, too
    return found.end()
