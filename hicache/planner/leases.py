"""Requests in L1: granting a prefix, growing, committing what was computed, giving back.

A granted request leases the nodes of its prefix, whole, and owns the private slots behind them.
"""

from array import array

from hicache.actions import (
    CopyPage,
    Fact,
    Grant,
    Grown,
    HitTokens,
    Load,
    Preempt,
    Refuse,
    Revoke,
    Tier,
    Touch,
    Wait,
)
from hicache.events import OpId, RequestId
from hicache.keys import KEY_NBYTES, PageKey
from hicache.planner.operations import Operation
from hicache.planner.requests import Request
from hicache.planner.residency import Residency
from hicache.planner.writes import Writes
from hicache.rates import Rate
from hicache.tree import Node, Partial


class Leases:
    """The part of the planner that lends L1 to requests."""

    def __init__(
        self,
        residency: Residency,
        writes: Writes,
        prefill: Rate,
        requests: dict[RequestId, Request],
    ) -> None:
        self._books = residency
        self._config = residency.config
        self._writes = writes
        self._prefill = prefill
        self._requests = requests
        self.rate = Rate()
        """Of loads, in bytes."""

    # ------------------------------------------------------------ granting

    def grant(self, request: Request, num_tokens_ahead: int) -> bool:
        """Lend a request its prefix and room to go on; False if there is no room now."""
        books, page_size = self._books, self._config.page_size
        device, host = self._reach(request)
        tree = request.tree
        node = tree.locate(request.prefix[: host * tree.page_nbytes]) if host else tree.root
        assert node.end == host
        for part in node.path():
            if part.device.incoming and part.device.num_pages < part.num_pages:
                tree.split(part, part.device.num_pages)
        partial = self._partial(request, host)
        hit_tokens = host * page_size + (partial.num_tokens if partial else 0)
        num_tokens = len(request.tokens) // 4
        covered = min(num_tokens, hit_tokens + num_tokens_ahead)
        num_private = -(-covered // page_size) - host
        path = node.path()
        self._lease(path, +1)
        source = self._hold_source(partial)
        loading = [part for part in path if part.device.num_pages < part.num_pages]
        self._hold_host(loading, +1)  # making room for a load must not evict its source
        slots = books.take_device(host - device + num_private)
        self._hold_host(loading, -1)
        if slots is None:
            self._release_source(source)
            self._lease(path, -1)
            return False
        request.lease, request.committed = node, host
        loads = self._load(request, path, slots[: host - device])
        for part in path:
            request.slots += part.device.slots + part.device.incoming
        request.slots += slots[host - device :]
        if source is not None and partial is not None:
            loads.append(self._copy(request, source, partial, request.slots[host]))
        self._touch(request, path)
        hit = self._hit(request, device, host, source, partial)
        books.actions.append(Grant(request.id, request.slots[:], hit, tuple(loads)))
        self._explain(request, hit)
        return True

    def _reach(self, request: Request) -> tuple[int, int]:
        """Return how many pages to use from L1, and from L1 and L2 together."""
        match = request.tree.match(request.prefix)
        device = host = 0
        in_device = True
        for node in match.node.path():
            matched = min(match.num_pages - node.start, node.num_pages)
            here = min(node.device.num_pages, matched) if in_device else 0
            device += here
            in_device = in_device and here == matched
            at_hand = max(here, min(len(node.host.slots), matched))
            host += at_hand
            if at_hand < matched:
                break
        if host > device and self._is_cheaper_computed(host - device):
            self._books.facts.append(
                Fact("missed", "host", "recompute_cheaper", host - device, request.id)
            )
            host = device
        return device, host

    def _is_cheaper_computed(self, num_pages: int) -> bool:
        compute_s = self._prefill.seconds(num_pages * self._config.page_size)
        if not compute_s or self.rate.seconds(num_pages * self._config.page_nbytes) <= compute_s:
            return False
        self.rate.passed_over()
        return True

    def _partial(self, request: Request, num_pages: int) -> Partial | None:
        """Return the page behind the prefix whose first tokens can be copied, if there is one."""
        tree = request.tree
        match = tree.match(request.prefix[: num_pages * tree.page_nbytes])
        partial = tree.partial(match, request.tokens[: request.max_hit_tokens * 4])
        if partial is None:
            return None
        node, index = partial.node, partial.index
        return partial if index < max(len(node.device.slots), len(node.host.slots)) else None

    def _hold_source(self, partial: Partial | None) -> Operation | None:
        if partial is None:
            return None
        op = self._books.begin("copy_page", 1)
        op.held_tier = "device" if partial.index < len(partial.node.device.slots) else "host"
        self._books.hold(partial.node, op.held_tier, op)
        return op

    def _hold_host(self, nodes: list[Node], change: int) -> None:
        for node in nodes:
            node.host.holds += change
            self._books.refresh(node)

    def _release_source(self, op: Operation | None) -> None:
        if op is not None:
            self._books.end(op)

    def _copy(self, request: Request, op: Operation, partial: Partial, target: int) -> OpId:
        node = partial.node
        where = node.device if op.held_tier == "device" else node.host
        source = where.slots[partial.index]
        op.request, op.target = request.id, target
        self._books.actions.append(
            CopyPage(op.id, op.held_tier, source, target, partial.num_tokens)
        )
        return op.id

    def _load(self, request: Request, path: list[Node], slots: "array[int]") -> list[OpId]:
        """Start the load of the nodes that are not whole in L1; return all loads to wait for."""
        books = self._books
        loads = {op.id for node in path if node.device.incoming for op in _loads(node)}
        if not slots:
            return sorted(loads)
        op = books.begin("load", len(slots), request.id)
        source, used = array("i"), 0
        for node in path:
            first = len(node.device.slots)
            if first == node.num_pages or node.device.incoming:
                continue
            count = node.num_pages - first
            source += node.host.slots[first : node.num_pages]
            books.hold(node, "host", op)
            books.bring(op, node, slots[used : used + count])
            used += count
        assert used == len(slots) == len(source)
        books.actions.append(Load(op.id, source, slots))
        return [*sorted(loads), op.id]

    def _touch(self, request: Request, path: list[Node]) -> None:
        """Count a use of each node of a path, once, and pass it on to storage now and then."""
        books, now = self._books, self._books.now
        keys: list[PageKey] = []
        for node in path:
            node.last_used = now
            node.uses += 1
            node.priority = max(node.priority, request.priority)
            if node.last_user != request.id:
                node.last_user = request.id
                node.users += 1
                self._writes.mark(node)
            if node.stored and now - node.touched >= self._config.touch_interval_s:
                node.touched = now
                known = node.keys[: node.stored * KEY_NBYTES]
                keys += [
                    PageKey(known[i : i + KEY_NBYTES]) for i in range(0, len(known), KEY_NBYTES)
                ]
            books.refresh(node)
        if keys and books.is_storage_up:
            books.actions.append(Touch(keys))

    def _hit(
        self,
        request: Request,
        device: int,
        host: int,
        source: Operation | None,
        partial: Partial | None,
    ) -> HitTokens:
        page_size = self._config.page_size
        local = max(device, min(host, request.local_pages))
        tokens: dict[Tier, int] = {
            "device": device * page_size,
            "host": (local - device) * page_size,
            "storage": (host - local) * page_size,
        }
        if source is not None and partial is not None:
            tier: Tier = source.held_tier
            if tier == "host" and host > local:
                tier = "storage"
            tokens[tier] += partial.num_tokens
        return HitTokens(tokens["device"], tokens["host"], tokens["storage"])

    def _explain(self, request: Request, hit: HitTokens) -> None:
        facts, page_size = self._books.facts, self._config.page_size
        by_tier: list[tuple[Tier, int]] = [
            ("device", hit.device),
            ("host", hit.host),
            ("storage", hit.storage),
        ]
        for tier, num_tokens in by_tier:
            if num_tokens:
                facts.append(Fact("hit", tier, "", -(-num_tokens // page_size), request.id))
        missed = len(request.prefix) // request.tree.page_nbytes - request.committed
        if missed:
            facts.append(Fact("missed", "device", self._why(request), missed, request.id))

    def _why(self, request: Request) -> str:
        """Say why a request's hit ends where it does."""
        tree, end = request.tree, request.committed
        match = tree.match(request.prefix)
        if match.num_pages > end:
            node = tree.match(request.prefix[: (end + 1) * tree.page_nbytes]).node
            return "not_fetched" if end - node.start < node.stored else "arriving"
        if not self._config.num_ghosts or not self._books.ghosts:
            return "never_seen"
        node = match.node
        parent = tree.namespace if node.is_root else node.key(match.inside - 1)
        first = request.prefix[end * tree.page_nbytes : (end + 1) * tree.page_nbytes]
        ghost = self._books.ghost(parent, first)
        return "never_seen" if ghost is None else f"evicted_from_{ghost[0]}"

    # ------------------------------------------------------------ growing

    def extend(self, request: Request, num_pages: int) -> None:
        """Give a request private slots up to ``num_pages`` pages, or say what to do instead."""
        books = self._books
        missing = num_pages - len(request.slots)
        slots = books.take_device(missing) if missing > 0 else array("i")
        if slots is not None:
            request.slots += slots
            books.actions.append(Grown(request.id, slots))
            return
        if books.coming >= missing:
            books.actions.append(Wait(request.id, "demoting"))
            return
        running = [other for other in self._requests.values() if other.is_granted]
        if running == [request]:
            reason = f"needs {num_pages} pages, L1 has {self._config.device_pages}"
            books.actions.append(Refuse(request.id, reason))
            return
        promised = sum(other.num_private for other in running if other.is_preempted)
        if promised < missing:
            victim = min(
                (other for other in running if not other.is_preempted),
                key=lambda other: (other.priority, -other.id),
                default=None,
            )
            if victim is not None:
                victim.is_preempted = True
                books.facts.append(Fact("preempted", "device", "", victim.num_private, victim.id))
                books.actions.append(Preempt(victim.id))
        books.actions.append(Wait(request.id, "device_full"))

    # ------------------------------------------------------------ committing

    def commit(self, request: Request, tokens: bytes) -> None:
        """Share computed pages: put them in the tree, behind the request's lease.

        A copy that is there or on its way is never replaced: the request keeps its own slot
        until its release. Pages behind a copy that is still on its way wait for it.
        """
        request.uncommitted += tokens
        assert len(request.uncommitted) % request.tree.page_nbytes == 0
        while request.uncommitted:
            node = self._next(request)
            if node is None:
                return
            assert request.lease is not None
            request.lease, request.committed = node, node.end
            self._writes.mark(node)

    def _next(self, request: Request) -> Node | None:
        """Lease one more node for the pages to commit; None where the way on is not clear yet."""
        tree, tokens, top = request.tree, request.uncommitted, request.lease
        assert top is not None
        child = top.children.get(tokens[: tree.page_nbytes])
        if child is None:
            request.uncommitted = b""
            return self._append(request, top, tokens)
        if child.device.incoming:
            return None
        if not tokens.startswith(child.tokens):
            child = tree.locate(tokens, top)
            assert child.parent is top
        request.uncommitted = tokens[len(child.tokens) :]
        first, resident = request.committed, len(child.device.slots)
        request.duplicates.update(range(first, first + resident))
        if resident < child.num_pages:
            mine = request.slots[first + resident : first + child.num_pages]
            self._books.set_pages(child, "device", child.device.slots + mine)
        child.leases += 1
        self._visit(request, child)
        return child

    def _append(self, request: Request, top: Node, tokens: bytes) -> Node:
        """Put pages that the tree does not know below ``top``, in its last node if it may grow."""
        tree, books = request.tree, self._books
        first = request.committed
        slots = request.slots[first : first + len(tokens) // tree.page_nbytes]
        is_growable = (
            not top.is_root
            and not top.children
            and top.leases == 1
            and top.users == 1
            and len(top.device.slots) == top.num_pages
        )
        if is_growable:
            tree.grow(top, tokens)
            node = top
        else:
            node = tree.add(top, tokens, books.now)
            node.leases = 1
        self._attach_keys(request, node)
        books.set_pages(node, "device", node.device.slots + slots)
        self._visit(request, node)
        return node

    def _attach_keys(self, request: Request, node: Node) -> None:
        """Give a node the keys that were computed for the probe, so that none is computed twice."""
        first = node.start + len(node.keys) // KEY_NBYTES - request.keys_start
        above = node.parent
        assert above is not None
        if first >= 0 and len(above.keys) == above.num_pages * KEY_NBYTES:
            last = node.end - request.keys_start
            node.keys += request.keys[first * KEY_NBYTES : last * KEY_NBYTES]

    def _visit(self, request: Request, node: Node) -> None:
        node.last_used = self._books.now
        node.priority = max(node.priority, request.priority)
        if node.last_user != request.id:
            node.last_user = request.id
            node.users += 1
            node.uses += 1
        self._books.refresh(node)

    # ------------------------------------------------------------ giving back

    def release(self, request: Request) -> None:
        """Take back everything that a granted request has."""
        books = self._books
        if request.uncommitted:
            self.commit(request, b"")
        self._free_private(request, 0)
        node = request.lease
        assert node is not None
        path = node.path()
        self._lease(path, -1)
        request.lease = None
        while not node.is_root:
            books.merge_up(node)
            assert node.parent is not None
            node = node.parent

    def revoke(self, request: Request, num_pages: int) -> None:
        """Cut a request back to its first pages: what was behind them never arrived."""
        self._free_private(request, num_pages)
        node = request.lease
        assert node is not None
        while node.end > num_pages:
            node.leases -= 1
            self._books.refresh(node)
            assert node.parent is not None
            node = node.parent
        assert node.end == num_pages
        request.lease, request.committed = node, num_pages
        request.uncommitted = b""
        request.slots = request.slots[:num_pages]
        self._books.actions.append(
            Revoke(request.id, num_pages * self._config.page_size, request.slots[:])
        )

    def copied(self, op: Operation, is_good: bool) -> None:
        """Take note that a page was copied for a partial hit, or was not."""
        op.target = None
        request = self._requests.get(op.request) if op.request is not None else None
        if not is_good and request is not None and request.lease is not None:
            self.revoke(request, request.committed)

    def loaded(self, op: Operation, outcomes: list[bool]) -> None:
        """Make loaded pages resident. A failure takes all that leads on from it out of L1."""
        books = self._books
        good = outcomes.index(False) if False in outcomes else len(outcomes)
        outcomes = [index < good for index in range(len(outcomes))]
        for node, arrived, expected in books.arrived(op, outcomes):
            if arrived:
                books.facts.append(Fact("loaded", "device", "", arrived, op.request))
            if arrived < expected:
                books.facts.append(Fact("failed", "device", "load", expected - arrived, op.request))
                self._cut(node)
        if good == len(outcomes):
            seconds = books.now - op.started
            self.rate.measured(good * self._config.page_nbytes, seconds)
        books.release_holds(op)

    def _cut(self, node: Node) -> None:
        """Take out of L1 what is below the resident pages of a node, and revoke who needs it."""
        tree, valid = node.tree, node.start + len(node.device.slots)
        needing = [
            request for request in self._requests.values()
            if request.lease is not None and node in request.lease.path()
        ]  # fmt: skip
        if needing and node.device.slots:
            tree.split(node, len(node.device.slots))  # the node is now what is not valid
        for request in needing:
            self.revoke(request, valid)
        below = [node]
        for part in below:
            below.extend(part.children.values())
        for part in below:
            for op in _loads(part):
                op.orphans += part.device.incoming
                op.drop(part)
                self._books.set_pages(part, "device", part.device.slots)
                self._books.unclaim(part, op)
            assert part is node or not part.device.num_pages
        for part in reversed(below):
            self._books.settle(part, "device")

    def _free_private(self, request: Request, first: int) -> None:
        """Free the private slots from a page on; those being written are freed by their copy."""
        private = array("i", (request.slots[i] for i in sorted(request.duplicates) if i >= first))
        private += request.slots[max(request.committed, first) :]
        for op in self._books.operations.values():
            if op.target is not None and op.request == request.id:
                private.remove(op.target)
                op.orphans.append(op.target)
                op.target = None
        self._books.device_slots.free(private)
        request.duplicates = {index for index in request.duplicates if index < first}

    def _lease(self, path: list[Node], change: int) -> None:
        for node in path:
            node.leases += change
            self._books.refresh(node)


def _loads(node: Node) -> list[Operation]:
    """The loads that bring pages to a node."""
    return [
        claim for claim in node.claims
        if isinstance(claim, Operation) and claim.brings("load", node)
    ]  # fmt: skip
