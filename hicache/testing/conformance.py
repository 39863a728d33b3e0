"""The contract of ``StorageBackend`` as pytest tests that its author inherits.

::

    class TestMyBackend(BackendTests):
        @pytest.fixture
        async def backend(self, tmp_path: Path) -> AsyncIterator[StorageBackend]:
            async with MyBackend(tmp_path) as backend:
                yield backend

Override ``backend``; and ``reopen`` where records outlive the process, ``bounded`` where the
backend keeps to a budget. Tests of what was not overridden are skipped. The tests are async, by
anyio's pytest plugin; what they try is in ``hicache.testing.checks``.
"""

import pytest

from hicache.storage import StorageBackend
from hicache.testing.checks import CHECKS, Check, Needs
from hicache.testing.records import Reopen, Subject, key, put, read, record

__all__ = ["BackendTests", "Reopen", "key", "put", "read", "record"]


def _each(needs: Needs) -> pytest.MarkDecorator:
    checks = [check for check in CHECKS if check.needs == needs]
    return pytest.mark.parametrize("check", checks, ids=lambda check: str(check.name))


class BackendTests:
    """The contract. Override ``backend``, and ``reopen`` and ``bounded`` where they apply."""

    pytestmark = pytest.mark.anyio

    @pytest.fixture
    def anyio_backend(self) -> str:
        return "asyncio"

    @pytest.fixture
    async def backend(self) -> StorageBackend:
        """An open, empty backend with room for 64 MiB at least."""
        raise NotImplementedError("provide a fixture that returns an open, empty backend")

    @pytest.fixture
    async def reopen(self, backend: StorageBackend) -> Reopen:
        """A function that closes ``backend`` and opens its store anew."""
        pytest.skip("records do not outlive this backend")

    @pytest.fixture
    async def bounded(self) -> StorageBackend:
        """An open, empty backend with a budget of 8 MiB."""
        pytest.skip("this backend is not said to keep to a budget")

    @_each("backend")
    async def test_contract(self, check: Check, backend: StorageBackend) -> None:
        await check.run(Subject(backend))

    @_each("reopen")
    async def test_contract_over_restarts(
        self, check: Check, backend: StorageBackend, reopen: Reopen
    ) -> None:
        await check.run(Subject(backend, reopen))

    @_each("bounded")
    async def test_contract_within_a_budget(self, check: Check, bounded: StorageBackend) -> None:
        await check.run(Subject(bounded))
