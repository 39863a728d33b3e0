"""What authors of backends test with."""

import pytest

pytest.register_assert_rewrite("hicache.testing.conformance")

from hicache.testing.conformance import BackendTests  # noqa: E402 (rewritten, so after that)

__all__ = ["BackendTests"]
