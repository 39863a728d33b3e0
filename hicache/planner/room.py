"""Room in L1 and L2: what leaves, so that something else can come.

A page of L1 that L2 has too leaves at once; another is copied to L2 first, and leaves when that
is done. A page of L2 leaves at once.
"""

from array import array
from collections.abc import Callable
from typing import Literal

from hicache.actions import BackUp, Fact
from hicache.planner.operations import Operation
from hicache.planner.residency import Residency
from hicache.tree import Node


class Room:
    """The part of the planner that evicts."""

    def __init__(self, residency: Residency) -> None:
        self._books = residency
        self._config = residency.config
        self.release_prefetches: Callable[[], bool] = lambda: False
        """Gives up what waiting requests hold in L1; whether there was anything."""

    # ------------------------------------------------------------ in L1

    def take_device(self, num_pages: int) -> "array[int] | None":
        """Return free L1 slots, evicting what may be evicted; None if there are not enough now.

        Where pages must be copied to L2 first, ``coming`` says how many slots there will be.
        """
        self._make_room(num_pages)
        if self.coming < num_pages and self.release_prefetches():
            self._make_room(num_pages)
        return self._books.device_slots.allocate(num_pages)

    @property
    def coming(self) -> int:
        """L1 slots that are free, or will be when the demotions under way are done."""
        books = self._books
        return books.device_slots.num_free + books.num_demoting

    def demote_ahead(self) -> None:
        """Keep the low-water mark of free L1 pages, where evicting would need a copy.

        A victim goes whole, up to a batch: many small copies would cut it up page by page.
        """
        low_water = self._config.low_water_pages
        while (missing := low_water - self.coming) > 0:
            victim = self._books.orders.device_victim()
            if victim is None or self._may_go_at_once(victim):
                return
            self._demote(victim, max(missing, min(low_water, self._config.batch_pages)))

    def trim_device(
        self,
        node: Node,
        num_pages: int,
        kind: Literal["evicted", "demoted", "dropped"],
        reason: str,
    ) -> None:
        """Free trailing L1 pages of a node."""
        books = self._books
        keep = len(node.device.slots) - num_pages
        freed = node.device.slots[keep:]
        books.set_pages(node, "device", node.device.slots[:keep])
        books.device_slots.free(freed)
        books.facts.append(Fact(kind, "device", reason, num_pages))
        books.settle(node, "forgotten" if reason == "forgotten" else "device")

    def _make_room(self, num_pages: int) -> None:
        books = self._books
        while (missing := num_pages - self.coming) > 0:
            victim = books.orders.device_victim()
            if victim is None:
                if not books.orders.kept:
                    return
                books.unkeep(list(books.orders.kept))
            elif self._may_go_at_once(victim):
                is_demoted = bool(victim.host.slots)
                wanted = min(len(victim.device.slots), missing)
                self.trim_device(victim, wanted, "demoted" if is_demoted else "dropped", "room")
            else:
                self._demote(victim, missing)

    def _may_go_at_once(self, node: Node) -> bool:
        """Whether L2 has the L1 pages of a node, or there is no L2."""
        return len(node.host.slots) >= len(node.device.slots) or not self._config.host_pages

    def _demote(self, victim: Node, num_pages: int) -> None:
        """Copy trailing L1 pages of a victim to L2, then free them; drop them if L2 has no room."""
        resident, copied = len(victim.device.slots), len(victim.host.slots)
        num_pages = min(num_pages, resident - copied)
        if not victim.host.incoming:
            keep = resident - num_pages
            if keep and keep != copied:
                victim.tree.split(victim, keep)
            op = self.back_up(victim)
            if op is not None:
                self._books.demote(op)
                return
        reason = "busy" if victim.host.incoming else "host_full"
        is_stored = victim.stored >= len(victim.device.slots)
        self.trim_device(victim, num_pages, "evicted" if is_stored else "dropped", reason)

    # ------------------------------------------------------------ in L2

    def take_host(self, num_pages: int) -> "array[int] | None":
        """Return free L2 slots, evicting what may be evicted; None if there are not enough."""
        books = self._books
        while (missing := num_pages - books.host_slots.num_free) > 0:
            victim = books.orders.host_victim()
            if victim is not None:
                self._evict_host(victim, missing)
            elif books.orders.kept:
                books.unkeep(list(books.orders.kept))
            else:
                return None
        return books.host_slots.allocate(num_pages)

    def back_up(self, node: Node) -> Operation | None:
        """Copy a node's L1 pages that L2 has not to L2; None if L2 has no room."""
        books, first = self._books, len(node.host.slots)
        num_pages = len(node.device.slots) - first
        assert num_pages > 0
        assert not node.host.incoming
        op = books.begin("back_up", num_pages)
        books.hold(node, "device", op)
        books.pin([node], +1)  # its own leading pages must not make the room
        target = self.take_host(num_pages)
        books.pin([node], -1)
        if target is None:
            books.facts.append(Fact("dropped", "host", "host_full", num_pages))
            books.end(op)
            return None
        books.bring(op, node, target)
        books.actions.append(BackUp(op.id, node.device.slots[first:], target))
        return op

    def _evict_host(self, victim: Node, num_pages: int) -> None:
        """Free trailing L2 pages of a victim, or put it off if it leads to what is in use."""
        books = self._books
        if self._is_needed(victim):
            books.orders.skip(victim)  # until some operation has ended
            return
        if len(victim.device.slots) < len(victim.host.slots) and books.orders.is_redundant(victim):
            victim = victim.tree.split(victim, len(victim.device.slots))  # the rest is not in L1
        resident = len(victim.host.slots)
        num_pages = min(num_pages, resident)
        keep = resident - num_pages
        has_copy = max(len(victim.device.slots), victim.stored) >= resident
        reason = "redundant" if len(victim.device.slots) > keep else "room"
        self._free_host(victim, keep)
        books.facts.append(Fact("evicted" if has_copy else "dropped", "host", reason, num_pages))
        books.settle(victim, "host")

    def _free_host(self, node: Node, keep: int) -> None:
        freed = node.host.slots[keep:]
        self._books.set_pages(node, "host", node.host.slots[:keep])
        self._books.host_slots.free(freed)

    def _is_needed(self, node: Node) -> bool:
        """Whether evicting from L2 would cut off descendants that are held or leased."""
        if not node.children or max(len(node.device.slots), node.stored) >= node.num_pages:
            return False
        stack = list(node.children.values())
        while stack:
            below = stack.pop()
            if below.claims:
                return True
            assert not below.device.num_pages  # L1 is prefix-closed
            stack.extend(below.children.values())
        return False

    # ------------------------------------------------------------ at the operator's word

    def flush(self) -> None:
        """Empty L1 and L2 of all that may be evicted."""
        books = self._books
        books.unkeep(list(books.orders.kept))
        self.release_prefetches()
        while (node := books.orders.device_victim()) is not None:
            self.trim_device(node, len(node.device.slots), "evicted", "flush")
        while (node := books.orders.host_victim()) is not None:
            self._evict_host(node, len(node.host.slots))

    def forget(self, node: Node) -> None:
        """Free what copies of a node may be freed, and let it leave the tree if that was all.

        To be called on descendants first. A node that is needed stays as it is.
        """
        books, device, host = self._books, node.device, node.host
        if device.slots and not (node.leases or device.holds or device.incoming or device.children):
            self.trim_device(node, len(device.slots), "dropped", "forgotten")
        if host.slots and not (host.holds or host.incoming or device.slots):
            books.facts.append(Fact("dropped", "host", "forgotten", len(host.slots)))
            self._free_host(node, 0)
        books.settle(node, "forgotten")
