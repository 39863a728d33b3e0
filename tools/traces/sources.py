"""Records out of a file: what it is packed in and how records are laid out in it.

Plain, gzip or xz; one JSON value a line, one JSON array of them, JSON values that take several
lines, or lines of CSV. It knows nothing of what a record means.
"""

import codecs
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
from typing import cast

from pydantic_core import from_json

from hicache.errors import InputError

STDIN = "-"
HEAD_NBYTES = 1 << 16
MAX_VALUE_CHARS = 1 << 27
"""Of one value in an array: beyond it the array is taken for broken, not for large."""

MESSAGE_LIST = re.compile(rb'\s*\[\s*\{\s*"(role|content|from|value|name|tool_calls)"')
SPACE = re.compile(r"[\s,]*")
JSON = json.JSONDecoder()


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
        raw = sys.stdin.buffer if self.is_stdin else self._path.open("rb", buffering=0)
        packed = io.BufferedReader(cast("io.RawIOBase", raw), HEAD_NBYTES)
        try:
            yield _unpacked(packed)
        finally:
            # Closing it would close stdin too, which is not ours.
            packed.detach()
            if not self.is_stdin:
                raw.close()


def _unpacked(packed: "io.BufferedReader[io.RawIOBase]") -> io.BufferedReader:
    head = packed.peek(6)
    unpacked: io.BufferedIOBase
    if head.startswith(b"\x1f\x8b"):
        unpacked = gzip.GzipFile(fileobj=packed)
    elif head.startswith(b"\xfd7zXZ\x00"):
        unpacked = lzma.LZMAFile(packed)  # noqa: SIM115
    else:
        return packed
    return io.BufferedReader(cast("io.RawIOBase", unpacked), HEAD_NBYTES)


def _records(stream: io.BufferedReader, name: str) -> Iterator[Record]:
    head = stream.peek(HEAD_NBYTES).removeprefix(b"\xef\xbb\xbf")
    start = head.lstrip()
    if start.startswith(b"[") and not MESSAGE_LIST.match(head):
        return _values(stream, name, is_array=True)
    if re.match(rb"\{\s*\n", start):
        return _values(stream, name, is_array=False)
    # A first line that is no JSON may be one that is malformed.
    return _lines(stream) if b"{" in head or start.startswith(b"[") else _csv_lines(stream)


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
    unread = Unread(stream, name)
    if is_array:
        unread.skip(1)
    while (next_char := unread.next_char()) != ("]" if is_array else ""):
        if not next_char:
            raise InputError(f"{name}:{unread.line}: the file ends within an array")
        line = unread.line
        yield Record(line, unread.value())


class Unread:
    """What is left of a text of JSON values."""

    def __init__(self, stream: io.BufferedReader, name: str) -> None:
        self.line = 1
        self._stream = stream
        self._name = name
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("replace").decode
        self._buffer = ""
        self._position = 0

    def next_char(self) -> str:
        """Return what comes after space and commas; nothing at the end."""
        while True:
            space = SPACE.match(self._buffer, self._position)
            self._advance(space.end() if space else self._position)
            if self._position < len(self._buffer) or not self._fill():
                return self._buffer[self._position : self._position + 1]

    def skip(self, num_chars: int) -> None:
        """Pass over characters after space."""
        self.next_char()
        self._advance(self._position + num_chars)

    def value(self) -> object:
        """Return the value that begins here; ``InputError`` if none does."""
        while True:
            try:
                value, end = JSON.raw_decode(self._buffer, self._position)
            except json.JSONDecodeError as error:
                if not self._fill():
                    what = f"{self._name}:{self.line}: is not JSON from here on"
                    raise InputError(f"{what}: {error.msg}") from None
            else:
                self._advance(end)
                return cast("object", value)

    def _advance(self, end: int) -> None:
        self.line += self._buffer.count("\n", self._position, end)
        self._position = end

    def _fill(self) -> bool:
        """Read as much again as there is; false at the end, and where a value is endless."""
        left = len(self._buffer) - self._position
        data = self._stream.read(max(HEAD_NBYTES, left)) if left < MAX_VALUE_CHARS else b""
        self._buffer = self._buffer[self._position :] + self._decode(data, final=not data)
        self._position = 0
        return bool(data)
