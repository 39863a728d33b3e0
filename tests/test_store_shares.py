"""The shares of tenants: whose records go, and in which order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.keys import NamespaceDigest, PageKey
from hicache.store.shares import OTHERS, Limit, Record, Shares

ACME, GUEST, NOBODY = (NamespaceDigest(bytes([n]) * 32) for n in (1, 2, 3))
SALT = b"acme's salt"


def shares(nbytes: int = 100, default: int | None = None) -> Shares:
    found = Shares({SALT: Limit("acme", nbytes)}, default)
    found.describe(ACME, SALT)
    found.describe(GUEST, b"another salt")
    found.describe(NOBODY, None)
    return found


def page(name: str, *, number: int = 0, nbytes: int = 10, stamp: float = 0.0) -> Record:
    """The page ``name`` continues the one whose name lacks its last letter."""
    parent = key(name[:-1]) if len(name) > 1 else bytes(32)
    return Record(key(name), parent, len(name) - 1, nbytes, stamp)


def key(name: str) -> PageKey:
    return PageKey(name.encode().ljust(32, b"."))


def put(books: Shares, *pages: Record, namespace: NamespaceDigest = ACME) -> list[str]:
    """Put records, all of which the backend accepts; return the names of those that went."""
    allowed, victims = books.take([(namespace, record) for record in pages])
    for record, is_allowed in zip(pages, allowed, strict=True):
        if is_allowed:
            books.written(record, True)
    books.check()
    return [victim.key.decode().rstrip(".") for victim in victims]


def test_the_record_used_longest_ago_goes_first() -> None:
    books = shares(30)
    put(books, page("a"), page("b"), page("c"))
    books.used([key("a")], now=5.0)

    assert put(books, page("d", stamp=6.0), page("e", stamp=6.0)) == ["b", "c"]
    assert books.nbytes == {"acme": 30}


def test_of_equal_age_the_tail_goes_before_the_head() -> None:
    books = shares(40)
    put(books, page("a"), page("ab"), page("abc"), page("abcd"))

    assert put(books, page("x", stamp=1.0), page("xy", stamp=1.0)) == ["abcd", "abc"]


def test_a_head_never_goes_before_its_tail_however_old_it_is() -> None:
    books = shares(30)
    put(books, page("a", stamp=0.0))
    put(books, page("ab", stamp=5.0))
    put(books, page("x", stamp=3.0))

    assert put(books, page("y", stamp=6.0)) == ["x"]
    assert put(books, page("z", stamp=7.0)) == ["ab"]
    assert put(books, page("w", stamp=8.0)) == ["a"]


def test_a_batch_makes_no_room_out_of_its_own_ancestors() -> None:
    books = shares(20)
    put(books, page("a"), page("x", stamp=1.0))

    assert put(books, page("ab", stamp=2.0)) == ["x"]


def test_what_is_larger_than_the_share_is_cut_at_its_tail() -> None:
    books = shares(25)
    pages = [page("a"), page("ab"), page("abc")]

    allowed, victims = books.take([(ACME, record) for record in pages])

    assert (allowed, victims) == ([True, True, False], [])
    for record in pages[:2]:
        books.written(record, True)
    books.check()


def test_one_tenants_records_are_no_victims_of_another() -> None:
    books = shares(20, default=20)
    put(books, page("a"), page("b"))

    for name in "pqrst":
        put(books, page(name, stamp=9.0), namespace=GUEST)

    assert books.nbytes == {"acme": 20, OTHERS: 20}
    assert put(books, page("n"), namespace=NOBODY) == []
    assert books.nbytes == {"acme": 20, OTHERS: 20}


def test_two_namespaces_of_one_default_have_a_share_each() -> None:
    books = shares(20, default=20)
    other = NamespaceDigest(b"o" * 32)
    books.describe(other, b"yet another salt")

    put(books, page("a"), page("b"), namespace=GUEST)

    assert put(books, page("c"), page("d"), namespace=other) == []
    assert books.nbytes == {"acme": 0, OTHERS: 40}


def test_what_a_backend_did_not_accept_counts_for_nothing() -> None:
    books = shares()
    record = page("a")
    books.take([(ACME, record)])

    books.written(record, False)
    books.written(record, False)

    assert books.nbytes == {"acme": 0}
    books.check()


def test_victims_that_could_not_be_deleted_are_put_back() -> None:
    books = shares(10)
    put(books, page("a"))
    record = page("b", stamp=1.0)
    allowed, victims = books.take([(ACME, record)])
    assert (allowed, [victim.key for victim in victims]) == ([True], [key("a")])

    books.written(record, False)
    books.put_back(victims)
    books.put_back(victims)

    assert books.nbytes == {"acme": 10}
    assert put(books, page("c", stamp=2.0)) == ["a"]


def test_a_record_that_is_gone_leaves_its_room_and_its_turn() -> None:
    books = shares(20)
    put(books, page("a"), page("ab"))

    books.gone([key("ab"), key("zzz")])

    assert books.nbytes == {"acme": 10}
    assert put(books, page("x", stamp=1.0), page("y", stamp=1.0)) == ["a"]


def test_a_record_that_is_put_again_counts_once() -> None:
    books = shares(20)
    put(books, page("a"))

    put(books, page("a", stamp=3.0))

    assert books.nbytes == {"acme": 10}


@pytest.mark.parametrize("is_described_first", [True, False])
def test_what_a_scan_finds_counts_for_whoever_it_belongs_to(is_described_first: bool) -> None:
    books = Shares({SALT: Limit("acme", 20)}, None)
    if is_described_first:
        books.describe(ACME, SALT)

    for name, namespace in (("a", ACME), ("ab", ACME), ("a", ACME), ("n", NOBODY)):
        books.found(namespace, page(name))
    books.describe(ACME, SALT)
    books.describe(NOBODY, None)
    books.found(NOBODY, page("m"))
    books.check()

    assert books.nbytes["acme"] == 20
    assert put(books, page("x", stamp=1.0)) == ["ab"]


def test_many_uses_leave_no_more_entries_than_a_few_a_record() -> None:
    books = shares(30)
    put(books, page("a"), page("ab"), page("x", stamp=1.0))

    for time in range(500):
        books.used([key("a"), key("ab")], now=float(time))
        books.check()

    assert put(books, page("y", stamp=501.0)) == ["x"]


def test_a_scan_keeps_no_more_than_so_many_records_that_nobody_claims() -> None:
    books = Shares({SALT: Limit("acme", 100)}, None, max_unclaimed=2)
    for name in "abc":
        books.found(ACME, page(name))

    books.describe(ACME, SALT)

    assert books.nbytes == {"acme": 20}


def test_without_limits_nothing_is_kept() -> None:
    books = Shares({}, None)
    books.describe(ACME, SALT)
    books.found(ACME, page("a"))

    assert put(books, page("b")) == []
    assert not books.is_limited
    assert books.nbytes == {}


NAMES = ("a", "ab", "abc", "abd", "x", "xy", "xyz")


@given(st.lists(st.tuples(st.sampled_from(["put", "use", "lose", "fail"]), st.sampled_from(NAMES))))
def test_whatever_happens_a_share_is_kept_and_no_head_is_missing(
    steps: list[tuple[str, str]],
) -> None:
    books, there = shares(40), set[str]()
    for time, (what, name) in enumerate(steps):
        if what == "put":
            chain = [name[:end] for end in range(1, len(name) + 1) if name[:end] not in there]
            gone = put(books, *(page(part, stamp=time) for part in chain))
            there = (there | set(chain)) - set(gone)
        elif what == "use":
            books.used([key(name[:end]) for end in range(1, len(name) + 1)], now=time)
        elif what == "fail":
            record = page(name, stamp=time)
            if name not in there:
                _, victims = books.take([(ACME, record)])
                books.written(record, False)
                books.put_back(victims)
        else:
            lost = {other for other in there if other.startswith(name)}
            there -= lost
            books.gone([key(other) for other in lost])
        books.check()
        assert books.nbytes["acme"] == 10 * len(there) <= 40
        assert all(other[:-1] in there or len(other) == 1 for other in there)
