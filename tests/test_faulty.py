"""The backend that fails on demand does just what it is told, and nothing else."""

import asyncio
import importlib
import threading

import pytest

from hicache.backends.memory import MemoryBackend
from hicache.errors import StorageFull
from hicache.keys import PageKey
from hicache.storage import StorageStats
from hicache.testing import Chances, Fault, FaultyBackend, Gate, flip, lose, tear, truncate
from hicache.testing.conformance import key, put, read, record
from hicache.testing.faulty import Method

pytestmark = pytest.mark.anyio
"""Of the tests that are async."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def faulty(chances: Chances | None = None, *, seed: int = 0) -> FaultyBackend:
    return FaultyBackend(MemoryBackend(), seed=seed, chances=chances)


async def call(backend: FaultyBackend, method: Method) -> object:
    """Call any method with one key."""
    calls = {
        "open": lambda: backend.open([]),
        "close": backend.close,
        "get": lambda: backend.get([key("a")], [[memoryview(bytearray(100))]]),
        "put": lambda: backend.put([(key("a"), [record("a")])]),
        "contains": lambda: backend.contains([key("a")]),
        "delete": lambda: backend.delete([key("a")]),
        "touch": lambda: backend.touch([key("a")]),
        "stats": backend.stats,
    }
    if method == "scan":
        return [item async for item in backend.scan(8)]
    return await calls[method]()


METHODS: list[Method] = [
    "open", "close", "get", "put", "contains", "delete", "touch", "scan", "stats"
]  # fmt: skip


def test_it_is_like_the_backend_inside() -> None:
    backend = faulty()

    assert backend.is_there()
    assert not backend.outlives_process
    assert (backend.evicts_itself, backend.is_shared) == (True, False)
    assert (backend.max_batch, backend.alignment) == (128, 1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("error", [OSError(5, "disk"), SystemExit(1)], ids=["OSError", "exit"])
async def test_the_next_call_raises_and_the_one_after_does_not(
    method: Method, error: BaseException
) -> None:
    backend = faulty()
    backend.next(method, Fault(error=error))

    with pytest.raises(type(error)):
        await call(backend, method)
    await call(backend, method)

    assert backend.num_calls == {method: 2}


async def test_always_is_until_healed() -> None:
    backend = faulty()
    backend.always(Fault(error=KeyError()), "get", "contains")
    for _ in range(3):
        with pytest.raises(KeyError):
            await call(backend, "get")
        with pytest.raises(KeyError):
            await call(backend, "contains")

    backend.heal()

    assert await call(backend, "get") == [None]


async def test_a_tampered_read_leaves_the_record_whole() -> None:
    backend = faulty()
    await put(backend, "a")
    faults = [Fault(tamper=tamper) for tamper in (lose, truncate, flip)]
    backend.next("get", *faults)

    assert await read(backend, "a") is None
    assert len(await read(backend, "a") or b"") < 100
    flipped = await read(backend, "a") or b""
    assert sum(a != b for a, b in zip(flipped, record("a"), strict=True)) == 1
    assert await read(backend, "a") == record("a")


async def test_a_tampered_read_is_scattered_over_its_buffers() -> None:
    backend = faulty()
    await put(backend, "a")
    first, second = bytearray(40), bytearray(60)
    backend.next("get", Fault(tamper=lambda found, random: found[::-1]))

    lengths = await backend.get([key("a")], [[memoryview(first), memoryview(second)]])

    assert (lengths, bytes(first + second)) == ([100], record("a")[::-1])


async def test_a_torn_read_has_its_length_and_ends_in_zeros() -> None:
    backend = faulty()
    await put(backend, "a")
    backend.next("get", Fault(tamper=tear))

    torn = await read(backend, "a") or b""

    assert len(torn) == 100
    assert torn != record("a")
    assert record("a").startswith(torn.rstrip(b"\0"))


async def test_a_fault_comes_on_schedule() -> None:
    backend = faulty()
    await put(backend, "a")
    backend.at("get", 2, Fault(tamper=lose))
    backend.next("get", Fault(tamper=lose))

    went = [await read(backend, "a") for _ in range(4)]

    assert [found is None for found in went] == [True, False, True, False]
    backend.at("get", 0, Fault(error=OSError()))
    backend.heal()
    assert await read(backend, "a") == record("a")


async def test_a_call_that_is_delayed_may_be_over_after_the_next_one() -> None:
    backend = faulty(Chances(delayed=0.5), seed=1)
    order: list[int] = []

    async def one(number: int) -> None:
        await put(backend, number)
        order.append(number)

    await asyncio.gather(*(one(number) for number in range(12)))

    assert sorted(order) == list(range(12))
    assert order != list(range(12))


async def test_a_call_that_hangs_by_chance_goes_on_when_the_gate_opens() -> None:
    backend = faulty(Chances(hung=1.0))
    hanging = asyncio.create_task(put(backend, "a"))
    for _ in range(5):
        await asyncio.sleep(0)
    hanging.cancel()
    await asyncio.sleep(0)
    assert not hanging.done()

    backend.hung.open()

    assert await hanging == [True]


async def test_a_tampered_write_stays() -> None:
    backend = faulty()
    backend.next("put", Fault(tamper=truncate), Fault(tamper=lose))

    assert await put(backend, "a") == [True]
    assert await put(backend, "b") == [True]

    assert 0 <= len(await read(backend, "a") or b"") < 100
    assert await backend.contains([key("a"), key("b")]) == [True, False]


async def test_tampered_headers_are_scanned() -> None:
    backend = faulty()
    await put(backend, "a", "b")
    backend.next("scan", Fault(tamper=lose), Fault(tamper=lambda found, random: b"x"))

    assert await call(backend, "scan") == []
    assert await call(backend, "scan") == [(key("a"), b"x"), (key("b"), b"x")]
    assert await call(backend, "scan") == [(key(name), record(name)[:8]) for name in "ab"]


async def test_a_lie_replaces_the_answer() -> None:
    backend = faulty()
    backend.next("contains", Fault(answer=lambda right: [right, 7]))

    assert await call(backend, "contains") == [[False], 7]


async def test_a_call_waits_at_the_gate_before_its_work_or_after_it() -> None:
    backend, before, after = faulty(), Gate(), Gate()
    backend.next("put", Fault(before=before), Fault(after=after))

    late = asyncio.create_task(put(backend, "a"))
    early = asyncio.create_task(put(backend, "b"))
    await asyncio.sleep(0)
    after.wait_until_reached()

    assert await backend.contains([key("a"), key("b")]) == [False, True]
    assert not early.done()
    before.open()
    after.open()
    assert (await late, await early) == ([True], [True])
    assert await backend.contains([key("a")]) == [True]


async def test_an_open_gate_stops_nobody() -> None:
    backend, gate = faulty(), Gate()
    gate.open()
    backend.next("put", Fault(before=gate))

    assert await put(backend, "a") == [True]

    gate.wait_until_reached()


async def test_a_gate_can_be_opened_by_another_thread() -> None:
    backend, gate = faulty(), Gate()
    backend.next("put", Fault(before=gate))
    waiting = asyncio.create_task(put(backend, "a"))

    def open_when_reached() -> None:
        gate.wait_until_reached()
        gate.open()

    opener = threading.Thread(target=open_when_reached)
    opener.start()

    assert await waiting == [True]

    opener.join()


async def test_a_cancelled_call_leaves_the_gate_unless_it_is_like_a_thread() -> None:
    backend, gate = faulty(), Gate()
    backend.next("put", Fault(before=gate), Fault(before=gate, ignores_cancel=True))
    polite, stubborn = (asyncio.create_task(put(backend, name)) for name in "ab")
    await asyncio.sleep(0)

    for _ in range(3):
        polite.cancel()
        stubborn.cancel()
        await asyncio.sleep(0)

    assert polite.cancelled()
    assert not stubborn.done()
    gate.open()
    assert await stubborn == [True]


async def test_a_gate_opened_after_its_caller_has_left_is_harmless() -> None:
    backend, gate = faulty(), Gate()
    backend.next("put", Fault(before=gate))
    waiting = asyncio.create_task(put(backend, "a"))
    await asyncio.sleep(0)
    gate.open()
    gate.open()
    waiting.cancel()

    with pytest.raises(asyncio.CancelledError):
        await waiting


def test_a_gate_can_be_opened_when_the_loop_of_its_caller_has_ended() -> None:
    backend, gate = faulty(), Gate()
    backend.next("put", Fault(before=gate))

    async def give_up_waiting() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(put(backend, "a"), 0)

    asyncio.run(give_up_waiting())

    gate.open()


async def test_nobody_at_the_gate_is_an_assertion() -> None:
    with pytest.raises(AssertionError, match="no call came"):
        Gate().wait_until_reached(timeout_s=0)


# ---------------------------------------------------------------- chance


async def outcomes(backend: FaultyBackend) -> list[str]:
    """Return how fifty puts and reads went."""
    went = []
    for number in range(50):
        try:
            accepted = await put(backend, number)
            found = await read(backend, number)
        except Exception as error:  # noqa: BLE001  whatever was injected
            went.append(type(error).__name__)
        else:
            whole = found == record(number)
            went.append(f"{accepted} {'whole' if whole else len(found or b'')}")
    return went


MUCH = Chances(error=0.2, lost=0.2, truncated=0.2, flipped=0.2, torn=0.2, short=0.2, full=0.2)


async def test_the_same_seed_fails_in_the_same_way() -> None:
    one = await outcomes(faulty(MUCH, seed=7))

    assert await outcomes(faulty(MUCH, seed=7)) == one
    assert await outcomes(faulty(MUCH, seed=8)) != one
    assert {"StorageFull", "[True] whole", "[True] 0", "[True] 100", "[] 0"} - {*one} <= {"[] 0"}


async def test_without_chances_nothing_fails() -> None:
    assert await outcomes(faulty()) == ["[True] whole"] * 50


async def test_healed_it_fails_no_more() -> None:
    backend = faulty(Chances(full=1.0))
    with pytest.raises(StorageFull):
        await put(backend, "a")

    backend.heal()

    assert await outcomes(backend) == ["[True] whole"] * 50
    assert await backend.stats() == StorageStats(50, 5000, None, 0)
    assert PageKey(bytes(32)) not in [found async for found, _ in backend.scan(0)]


def test_what_the_package_does_not_have_is_told() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'BackendTest'"):
        importlib.import_module("hicache.testing").__getattr__("BackendTest")
