"""``hicache store ls``: the prompts in a store as a tree of prefixes."""

import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from rich.text import Text

from hicache.codec import Keyring
from hicache.errors import InputError
from hicache.keys import TOKEN_NBYTES
from hicache.storage import StorageBackend
from hicache.tools.store import finding, reading, showing, texts
from hicache.tools.store.forest import Forest
from hicache.tools.store.naming import Named
from hicache.tools.store.sealed import tokens_of
from hicache.tools.store.texts import Decoder, Prefix

_LABEL_WIDTH = 64


@dataclass(slots=True)
class Branch:
    """A run of pages without a fork, and what goes on from it."""

    row: int
    num_own: int
    """Pages of the run."""
    num_pages: int
    """Of the run, and of all after it."""
    nbytes: int
    used: float
    children: list["Branch"] = field(default_factory=list)
    num_hidden: int = 0
    """Branches that go on from it and are not shown."""
    tokens: bytes | None = b""
    """Of its first page; ``None`` where they are sealed."""

    def label(self, decoder: Decoder | None) -> str:
        """Return how it begins, in a line."""
        if self.tokens is None:
            return "(sealed)"
        return texts.label(self.tokens, decoder, _LABEL_WIDTH) or "(gone)"


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of a tree is shown."""

    depth: int
    width: int


class Gardener:
    """Cuts a forest down to what is shown."""

    def __init__(self, forest: Forest, limits: Limits) -> None:
        self._forest = forest
        self._limits = limits
        self._num_pages = forest.totals(np.ones(len(forest), np.int64))
        self._nbytes = forest.totals(forest.nbytes.astype(np.int64))
        self._used = forest.latest()

    def branches(self, rows: list[int], depth: int = 1) -> tuple[list[Branch], int]:
        """Return the largest branches that begin with these pages, and how many more do."""
        ordered = sorted(rows, key=lambda row: (-self._nbytes[row], row))
        width = self._limits.width
        return [self._branch(row, depth) for row in ordered[:width]], max(0, len(rows) - width)

    def _branch(self, row: int, depth: int) -> Branch:
        branch = Branch(
            row, 1, int(self._num_pages[row]), int(self._nbytes[row]), float(self._used[row])
        )
        children = self._forest.children(row)
        while len(children) == 1:
            branch.num_own += 1
            children = self._forest.children(int(children[0]))
        if depth < self._limits.depth:
            branch.children, branch.num_hidden = self.branches(children.tolist(), depth + 1)
        else:
            branch.num_hidden = len(children)
        return branch


async def run(
    backend: StorageBackend,
    names: list[Named],
    limits: Limits,
    *,
    prefix: Prefix | None,
    decoder: Decoder | None,
    keyring: Keyring | None,
    is_json: bool,
) -> int:
    """Show the prefixes of these namespaces, the largest first."""
    forest = await Forest.read(backend, Counter(), [one.digest for one in names])
    gardener = Gardener(forest, limits)
    tops = None if prefix is None else await finding.tops(backend, forest, prefix, keyring)
    if tops is not None and not tops:
        raise InputError("nothing in this store begins with that prefix")
    trees: list[tuple[Named, list[Branch], int]] = []
    for which, digest in enumerate(forest.namespaces):
        [named] = [one for one in names if one.digest == digest]
        rows = forest.roots(which).tolist()
        if tops is not None:
            rows = [row for row in tops if forest.namespace[row] == which]
        if not rows:
            continue
        branches, num_hidden = gardener.branches(rows)
        await _read_tokens(backend, forest, branches, keyring)
        trees.append((named, branches, num_hidden))
    if is_json:
        showing.show_json(
            [
                {"namespace": named.digest.hex(), "hidden": hidden}
                | {"branches": [_as_json(one, decoder) for one in branches]}
                for named, branches, hidden in trees
            ]
        )
        return 0
    for named, branches, num_hidden in trees:
        _show(named, branches, num_hidden, decoder)
    return 0


async def _read_tokens(
    backend: StorageBackend, forest: Forest, branches: list[Branch], keyring: Keyring | None
) -> None:
    """Fill in the tokens of what is shown, all of one namespace."""
    head_nbytes = forest.head_nbytes[forest.namespace[branches[0].row]]
    shown = list(branches)
    for branch in shown:
        shown += branch.children
    heads = await reading.heads(backend, forest.keys(one.row for one in shown), head_nbytes)
    for branch, head in zip(shown, heads, strict=True):
        branch.tokens = tokens_of(head, keyring)


class _Drawing:
    """A table whose last column is a tree."""

    def __init__(self, named: Named, decoder: Decoder | None) -> None:
        self.table = showing.table(">pages", ">size", ">used", ">tokens", "prefix")
        self._page_size = named.namespace.layout.page_size if named.namespace else None
        self._decoder = decoder
        self._now = time.time()

    def add(self, branch: Branch, guide: str = "", before: str = "") -> None:
        """Draw a branch and what goes on from it; ``before`` is what stands before the latter."""
        num_tokens = branch.num_own * (self._page_size or len(branch.tokens or b"") // TOKEN_NBYTES)
        text = branch.label(self._decoder)
        self.table.add_row(
            f"{branch.num_pages:,}",
            showing.size(branch.nbytes),
            showing.span(max(0.0, self._now - branch.used)),
            f"{num_tokens:,}",
            Text(guide, style="dim").append(text, style="not dim"),
        )
        for number, child in enumerate(branch.children):
            is_last = number == len(branch.children) - 1 and not branch.num_hidden
            corner, under = ("└── ", "    ") if is_last else ("├── ", "│   ")
            self.add(child, before + corner, before + under)
        if branch.num_hidden:
            more = "more" if branch.children else "branches"
            self.hint(f"{before}└── … {branch.num_hidden:,} {more}")

    def hint(self, text: str) -> None:
        """Draw a line that says what is not shown."""
        self.table.add_row("", "", "", "", Text(text, style="dim"))


def _show(named: Named, branches: list[Branch], num_hidden: int, decoder: Decoder | None) -> None:
    drawing = _Drawing(named, decoder)
    for branch in branches:
        drawing.add(branch)
    if num_hidden:
        drawing.hint(f"… {num_hidden:,} more")
    showing.show(f"namespace {named.short}  {named.model}", drawing.table)


def _as_json(branch: Branch, decoder: Decoder | None) -> dict[str, object]:
    return {
        "pages": branch.num_pages,
        "nbytes": branch.nbytes,
        "used": branch.used,
        "own_pages": branch.num_own,
        "text": branch.label(decoder),
        "hidden": branch.num_hidden,
        "branches": [_as_json(child, decoder) for child in branch.children],
    }
