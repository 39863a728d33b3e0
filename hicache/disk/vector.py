"""Whole reads and writes of many buffers at one place of a file.

``preadv`` and ``pwritev`` take at most ``IOV_MAX`` buffers and 2 GiB, and may do less than asked;
these two do it all, or say so.
"""

import os
from collections.abc import Sequence

from typing_extensions import Buffer

IOV_MAX = os.sysconf("SC_IOV_MAX")
_WRITE_NBYTES = 512 * 1024
"""A call, at most: the kernel caches larger writes in pages of 2 MiB, and getting hold of those
made them 3 to 10 times slower on a machine whose memory had not been in use (ext4, Linux 6.18)."""


def nbytes_of(buffers: Sequence[Buffer]) -> int:
    """Return how many bytes the buffers have together."""
    return sum(memoryview(buffer).nbytes for buffer in buffers)


def read_all(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill the buffers, in order, from ``offset``; return how much was read.

    It is less than asked only where the file ends.
    """
    total = 0
    rest = list(buffers)
    while rest:
        count = os.preadv(fd, rest[:IOV_MAX], offset + total)
        if count == 0:
            break
        total += count
        rest = _after(rest, count)
    return total


def write_all(fd: int, buffers: Sequence[Buffer], offset: int) -> None:
    """Write the buffers, in order, at ``offset``. An error may leave part of it behind."""
    rest = [memoryview(buffer) for buffer in buffers]
    rest.reverse()  # the next one last, where taking it is O(1)
    while rest:
        vector: list[memoryview] = []
        room = _WRITE_NBYTES
        while rest and room and len(vector) < IOV_MAX:
            buffer = rest.pop()
            if buffer.nbytes > room:
                buffer = buffer.cast("B")
                rest.append(buffer[room:])
                buffer = buffer[:room]
            vector.append(buffer)
            room -= buffer.nbytes
        count = os.pwritev(fd, vector, offset)
        offset += count
        rest += reversed(_after(vector, count))


def limit(buffers: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """Return views of the first ``nbytes`` bytes of the buffers."""
    views: list[memoryview] = []
    for buffer in buffers:
        if nbytes <= 0:
            break
        views.append(buffer if buffer.nbytes <= nbytes else buffer.cast("B")[:nbytes])
        nbytes -= buffer.nbytes
    return views


def _after(buffers: list[memoryview], nbytes: int) -> list[memoryview]:
    """Return what is left of the buffers behind their first ``nbytes`` bytes; no empty ones."""
    for position, buffer in enumerate(buffers):
        if nbytes < buffer.nbytes:
            return [buffer.cast("B")[nbytes:], *buffers[position + 1 :]]
        nbytes -= buffer.nbytes
    return []
