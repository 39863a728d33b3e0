"""The exported stream, read back, and through another simulator."""

from pathlib import Path

import numpy as np
import pytest

from hicache.tools.replay.exporting import RECORD, export
from hicache.tools.replay.workload import load
from tests.replay.traces import conversation, needs_shared, trace_of


def test_each_reference_says_where_its_object_comes_next(tmp_path: Path) -> None:
    path = tmp_path / "stream.bin"

    num_references = export(load(trace_of([[1, 2], [1, 3], [1, 2]])), "oracle-general", path)

    records = np.fromfile(path, RECORD)
    assert num_references == 6
    assert records["object"].tolist() == [1, 2, 1, 3, 1, 2]
    assert records["next"].tolist() == [2, 5, 4, -1, -1, -1]
    assert records["time"].tolist() == [0, 0, 1, 1, 2, 2]


@needs_shared
@pytest.mark.slow
def test_another_simulator_gives_the_flat_lru_of_the_oracle(tmp_path: Path) -> None:
    libcachesim = pytest.importorskip("libcachesim", reason="libcachesim is not installed")
    workload, _ = conversation()
    path = tmp_path / "conversation.oracleGeneral"
    export(workload, "oracle-general", path)

    cache = libcachesim.LRU(cache_size=10_000)
    reader = libcachesim.TraceReader(
        trace=str(path), trace_type=libcachesim.TraceType.ORACLE_GENERAL_TRACE
    )
    miss_ratio, _ = cache.process_trace(reader)

    assert round(1 - miss_ratio, 4) == 0.2112
