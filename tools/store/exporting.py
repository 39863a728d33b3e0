"""``hicache store export``: a namespace as one file or stream."""

import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from hicache.errors import InputError
from hicache.keys import PageKey
from hicache.storage import StorageBackend, StoredRecord
from hicache.tools.store import reading, showing
from hicache.tools.store.bundle import Writer
from hicache.tools.store.forest import Forest
from hicache.tools.store.naming import Named
from hicache.tools.store.reading import Reader


async def run(backend: StorageBackend, named: Named, output: Path | None, *, is_json: bool) -> int:
    """Write the pages of a namespace; 1 if some could not be read and are left out.

    Pages whose ancestors are gone are left out too: nothing could reach them.
    """
    if named.namespace is None:
        raise InputError(
            f"namespace {named.short}: its description is missing, so nothing could prove its "
            "pages elsewhere; a server that opens it writes it down again"
        )
    counts: Counter[str] = Counter()
    forest = await Forest.read(backend, Counter(), [named.digest])
    is_orphan = np.zeros(len(forest), bool)
    is_orphan[forest.orphans()] = True
    rows = [row for row in np.argsort(forest.number, kind="stable").tolist() if not is_orphan[row]]
    counts["unreachable"] = len(forest) - len(rows)
    with _target(output) as stream, showing.progress("exporting", len(rows)) as bar:
        writer = Writer(stream)
        async for batch in Reader(backend).read(_records(named, forest, rows)):
            for found in batch:
                if found.header is not None and found.data is not None:
                    writer.add(found.record.key, found.data)
                else:
                    counts["gone" if found.problem is None else "bad"] += 1
            bar.add(len(batch))
        writer.end()
    num_pages = writer.num_records - 1
    told = {"pages": num_pages, "nbytes": writer.nbytes} | dict(counts)
    if is_json and output is not None:
        showing.show_json(told)
    else:
        text = f"{showing.count(num_pages, 'page')}, {showing.size(writer.nbytes)} exported"
        details = [f"{number:,} {what}" for what, number in sorted(counts.items()) if number]
        showing.say(", left out: ".join([text, ", ".join(details)] if details else [text]))
    return 1 if counts["bad"] else 0


async def _records(named: Named, forest: Forest, rows: list[int]) -> AsyncIterator[StoredRecord]:
    yield StoredRecord(PageKey(named.digest), b"", None)
    async for record in reading.stream(forest.records(rows)):
        yield record


@contextmanager
def _target(output: Path | None) -> Iterator[BinaryIO]:
    """Give where to write: a file that appears when it is whole, or stdout."""
    if output is None:
        if sys.stdout.isatty():
            raise InputError("stdout is a terminal: say --output FILE, or pipe it somewhere")
        yield sys.stdout.buffer
        return
    temporary = output.with_name(f"{output.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb", opener=showing.private) as file:
            yield file
        temporary.replace(output)
    except OSError as error:
        raise InputError(f"{output}: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)
