"""An index that grows under its readers has not been cut short."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from hicache.backends.lmdb.index import Index


def test_an_index_that_another_thread_sees_grow_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = Index(tmp_path / "index", 1 << 22)
    index.look_up([])
    real, size = os.fstat, os.stat(tmp_path / "index").st_size

    def seen_too_early(fd: int) -> object:
        """Size as of before; meanwhile another thread has looked at a file that has grown."""
        monkeypatch.setattr(os, "fstat", lambda fd: SimpleNamespace(st_size=size + 4096))
        index.look_up([])
        monkeypatch.setattr(os, "fstat", real)
        return SimpleNamespace(st_size=size)

    monkeypatch.setattr(os, "fstat", seen_too_early)

    assert index.look_up([]) == []

    monkeypatch.undo()
    index.close()
