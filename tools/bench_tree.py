"""What the radix tree and the eviction orders cost, beside ``memcmp`` of the same bytes.

Times are medians: of single calls where a call has its own figure, of whole passes where many
calls share one. The garbage collector is off while the clock runs, since a pause belongs to no
single call; ``tree.gc`` says what a full collection takes that sees the forest alone. Queries
are copies of what is in the tree, so that nothing is equal by being the same object.
"""

import gc
import random
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from operator import eq
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import track

from hicache.eviction import POLICIES, EvictionOrder
from hicache.keys import NamespaceDigest
from hicache.tools.report import Figures
from hicache.tree import NO_SLOTS, HiRadixTree, Node, Residence

PAGE_SIZE = 16
PAGE_NBYTES = PAGE_SIZE * 4
LONG_TOKENS = 131_072
CHAIN_NODES = 256
NAMESPACE = NamespaceDigest(bytes(32))


def run(json_path: Path | None = None, *, is_quick: bool = False) -> int:
    """Measure match, insert, lease, evict and memory; print the figures; return the exit code."""
    figures = Figures(f"Radix tree, pages of {PAGE_SIZE} tokens")
    parts = [bench_long_matches, bench_forest, bench_evictions, bench_memory]
    console = Console(stderr=True)
    for part in track(parts, "bench tree", console=console, disable=not sys.stderr.isatty()):
        with collector_off():
            part(figures, is_quick)
    return figures.report(json_path)


# ---------------------------------------------------------------- long matches


def bench_long_matches(figures: Figures, is_quick: bool) -> None:
    """Match 131,072 tokens as one node and as a chain, fresh and aged by evictions and reloads."""
    random_ = random.Random(1)
    tokens = random_.randbytes(LONG_TOKENS * 4)
    query, num_changes = copied(tokens), 1000 if is_quick else 100_000
    add_times(figures, "tree.match.memcmp", [seconds(eq, query, tokens) for _ in range(300)])
    for name, num_nodes, bar in [("one_node", 1, 25), ("chain", CHAIN_NODES, 130)]:
        tree = HiRadixTree(NAMESPACE, PAGE_SIZE)
        build_chain(tree, tokens, num_nodes)
        add_times(figures, f"tree.match.{name}", match_times(tree, query, num_nodes), bar)
        age(tree, tokens, num_changes, random_)
        add_times(figures, f"tree.match.{name}.aged", match_times(tree, query, num_nodes), bar)


def build_chain(tree: HiRadixTree, tokens: bytes, num_nodes: int) -> None:
    """Add a sequence in equal parts, each with a branch at its end, so that none can be merged."""
    node, nbytes = tree.root, len(tokens) // num_nodes
    for start in range(0, len(tokens), nbytes):
        node = put(tree, node, tokens[start : start + nbytes], now=0, in_host=True)
        if start + nbytes < len(tokens):
            put(tree, node, bytes(PAGE_NBYTES), now=0)


def match_times(tree: HiRadixTree, query: bytes, num_nodes: int) -> list[float]:
    """Return what whole matches take."""
    tree.check()
    found = tree.match(query)
    assert found.num_pages * PAGE_NBYTES == len(query)
    assert len(found.node.path()) == num_nodes, "evictions and reloads have left splits behind"
    return [seconds(tree.match, query) for _ in range(300)]


def age(tree: HiRadixTree, tokens: bytes, num_changes: int, random_: random.Random) -> None:
    """Evict from L1 and load again, at random places, so many times in all.

    In each round a request branches off at a random page, which splits; its branch is evicted,
    and so is the end of the sequence, up to 4 nodes of it; that is loaded again, into other
    slots; what differs in nothing is merged again, as at a release.
    """
    while num_changes > 0:
        cut = random_.randrange(PAGE_NBYTES, len(tokens), PAGE_NBYTES)
        branch = put(tree, tree.locate(tokens[:cut]), random_.randbytes(PAGE_NBYTES), now=0)
        tree.remove(branch)
        path = tree.match(tokens).node.path()
        keep = random_.randrange(path[-4:][0].num_pages)
        for node in path[-4:]:
            loaded = array("i", [random_.randrange(1 << 20)] * (node.num_pages - keep))
            node.device.slots = node.device.slots[:keep] + loaded
            num_changes -= 2
            keep = 0
        num_changes -= 1
        merge_again(tree, path)


def merge_again(tree: HiRadixTree, path: list[Node]) -> None:
    """Join every run of a path that differs in nothing."""
    run: list[Node] = []
    for node in reversed(path):
        run.append(node)
        if not tree.is_mergeable(node):
            if len(run) > 1:
                tree.merge(run[::-1])
            run = []


# ---------------------------------------------------------------- a forest


def bench_forest(figures: Figures, is_quick: bool) -> None:
    """Insert, match and lease in a tree of 100 system prompts x 10 x 10 sequences."""
    sequences = forest_sequences(10 if is_quick else 100)
    passes = [insert_times(sequences)[0] for _ in range(3 if is_quick else 9)]
    _, leaves = insert_times(sequences)
    tree = leaves[0].tree
    queries = [copied(tokens) for tokens in sequences[:2000]]
    pairs = zip(queries, sequences, strict=False)
    add_times(figures, "tree.match.forest.memcmp", [seconds(eq, *pair) for pair in pairs])
    add_times(figures, "tree.match.forest", [seconds(tree.match, query) for query in queries], 6)
    add_times(figures, "tree.insert.forest", passes, 15)

    order = EvictionOrder(POLICIES["lru"], in_l1)
    for leaf in leaves:
        order.put(leaf)
    add_times(figures, "tree.lease.forest", lease_times(order, leaves), 4)
    collections = [seconds(gc.collect) * 1e3 for _ in range(5)]
    figures.add("tree.gc", median(collections), "ms", spread=spread(collections))


def insert_times(sequences: list[bytes]) -> tuple[float, list[Node]]:
    """Return what inserting a sequence takes, in the mean of all, and where each ends."""
    tree = HiRadixTree(NAMESPACE, PAGE_SIZE)
    start = time.process_time()
    leaves = [insert(tree, tokens, now) for now, tokens in enumerate(sequences)]
    took = time.process_time() - start
    gc.collect()
    return took / len(sequences), leaves


def forest_sequences(num_systems: int) -> list[bytes]:
    """Return sequences of 2,048 tokens, shuffled: 1,024 of a system prompt, 512 and 512."""
    random_ = random.Random(2)
    sequences = []
    for _ in range(num_systems):
        system = random_.randbytes(1024 * 4)
        for _ in range(10):
            middle = random_.randbytes(512 * 4)
            sequences += [system + middle + random_.randbytes(512 * 4) for _ in range(10)]
    random_.shuffle(sequences)
    return sequences


def lease_times(order: EvictionOrder, leaves: list[Node]) -> list[float]:
    """Return what it takes to lease a leaf's path and to give it back, as the latest used."""
    now = count(len(leaves))

    def lease_and_unlease() -> None:
        tree = leaf.tree
        for node in tree.lease(leaf):
            if not node.device.children:
                order.discard(node)
        leaf.last_used = next(now)
        for node in tree.unlease(leaf):
            if not node.device.children:
                order.put(node)

    random_, times = random.Random(3), []
    for _ in range(5000):
        leaf = random_.choice(leaves)
        times.append(seconds(lease_and_unlease))
    return times


# ---------------------------------------------------------------- eviction


def bench_evictions(figures: Figures, is_quick: bool) -> None:
    """Evict 64 tokens at a time from few leaves and from many, under every policy."""
    few, many, num_rounds = 1000, 50_000, 3 if is_quick else 15
    for policy in POLICIES:
        big = leaves_in_order(policy, many)
        times: dict[int, list[float]] = {few: [], many: []}
        for _ in range(num_rounds):  # in turns, so that both see the same machine
            small = leaves_in_order(policy, few)
            for _ in range(60):
                times[few].append(seconds(evict, small, 4))
            for _ in range(60):
                times[many].append(seconds(evict, big, 4))
        add_times(figures, f"tree.evict.{policy}.{few}", times[few])
        add_times(figures, f"tree.evict.{policy}.{many}", times[many], 20)
        ratio = median(times[many]) / median(times[few])
        figures.add(f"tree.evict.{policy}.ratio", ratio, "times", at_most=2)


def leaves_in_order(policy: str, num_leaves: int) -> EvictionOrder:
    """Return an order of leaves of 1 to 8 pages, 10 to a parent, used at random times."""
    random_, tree = random.Random(4), HiRadixTree(NAMESPACE, PAGE_SIZE)
    order = EvictionOrder(POLICIES[policy], in_l1)
    parent = tree.root
    for index in range(num_leaves):
        if index % 10 == 0:
            parent = put(tree, tree.root, random_.randbytes(4 * PAGE_NBYTES), now=0)
        tokens = random_.randbytes(random_.randint(1, 8) * PAGE_NBYTES)
        leaf = put(tree, parent, tokens, now=random_.random())
        leaf.last_used, leaf.uses = leaf.created + random_.random(), random_.randint(1, 5)
        leaf.priority = random_.randrange(3)
        order.put(leaf)
    return order


def evict(order: EvictionOrder, num_pages: int) -> None:
    """Drop pages from L1 one by one, each from the tail of the first victim."""
    for _ in range(num_pages):
        node = order.first()
        assert node is not None
        residence, parent = node.device, node.parent
        residence.slots = residence.slots[:-1] or NO_SLOTS
        if residence.slots:
            node.tree.shrink(node, len(residence.slots))
            continue
        order.discard(node)
        residence.slots = NO_SLOTS
        assert parent is not None
        parent.device.children -= 1
        node.tree.shrink(node, 0)
        if not parent.device.children and not parent.is_root:
            order.put(parent)


# ---------------------------------------------------------------- memory


def bench_memory(figures: Figures, is_quick: bool) -> None:
    """Weigh trees whose pages are in L1 and L2, believed stored, and have keys: all there can be.

    Without places in eviction orders, which are some 80 bytes a leaf and tier.
    A token's and a node's share are told apart by two trees of as many nodes, short and long.
    """
    num_nodes = 500 if is_quick else 5000
    short, long = 8, 64
    weights = {pages: weigh_fan(num_nodes, pages) for pages in (short, long)}
    num_tokens = num_nodes * (long - short) * PAGE_SIZE
    per_token = (weights[long] - weights[short]) / num_tokens
    per_node = weights[short] / num_nodes - per_token * short * PAGE_SIZE
    figures.add("tree.memory.bytes_per_token", per_token, "bytes", at_most=8)
    figures.add("tree.memory.bytes_per_node", per_node, "bytes")  # the bar is on the sum, below
    for pages, weight in weights.items():
        bar = 8 * pages * PAGE_SIZE + 600
        figures.add(f"tree.memory.node_of_{pages}_pages", weight / num_nodes, "bytes", at_most=bar)


def weigh_fan(num_nodes: int, num_pages: int) -> int:
    """Return the bytes of a tree: nodes of so many pages, each used at a time of its own."""
    random_ = random.Random(5)
    tokens = [random_.randbytes(num_pages * PAGE_NBYTES) for _ in range(num_nodes)]
    tracemalloc.start()
    try:
        tree = HiRadixTree(NAMESPACE, PAGE_SIZE)
        parent = tree.root
        for index in range(num_nodes):
            above = parent if index % 10 else tree.root
            node = put(tree, above, copied(tokens[index]), now=index * 0.1, in_host=True)
            node.stored = num_pages
            node.key(num_pages - 1)
            parent = parent if index % 10 else node
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------- what all parts use


def in_l1(node: Node) -> Residence:
    """Return where a node keeps its place in an order of L1."""
    return node.device


def insert(tree: HiRadixTree, tokens: bytes, now: float) -> Node:
    """Return the node of a sequence, resident in L1; new where it was unknown."""
    node = tree.locate(tokens)
    known = node.end * PAGE_NBYTES
    return put(tree, node, tokens[known:], now) if known < len(tokens) else node


def put(
    tree: HiRadixTree, parent: Node, tokens: bytes, now: float, *, in_host: bool = False
) -> Node:
    """Return a new node that is whole in L1, and in L2 if so said."""
    node = tree.add(parent, tokens, now)
    node.device.slots = array("i", bytes(4 * node.num_pages))
    parent.device.children += 1
    if in_host:
        node.host.slots = node.device.slots[:]
        parent.host.children += 1
    return node


def copied(tokens: bytes) -> bytes:
    """Return equal bytes elsewhere in memory."""
    return bytes(bytearray(tokens))


@contextmanager
def collector_off() -> Iterator[None]:
    """Keep the garbage collector off, and what there is already out of its sight."""
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


def seconds(work: Callable[..., object], *arguments: object) -> float:
    """Return what one call takes."""
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start


def add_times(
    figures: Figures, name: str, times: list[float], at_most_us: float | None = None
) -> None:
    """Note the median, in microseconds, with the middle half as its spread."""
    microseconds = [second * 1e6 for second in times]
    figures.add(name, median(microseconds), "us", at_most=at_most_us, spread=spread(microseconds))


def spread(values: list[float]) -> tuple[float, float]:
    """Return the quartiles: a busy machine makes the ends say nothing."""
    ordered = sorted(values)
    return ordered[len(ordered) // 4], ordered[len(ordered) * 3 // 4]
