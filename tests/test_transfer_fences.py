"""Every fence between the streams is there, and each is needed."""

import inspect
from collections.abc import Callable
from types import ModuleType

import pytest

from hicache.transfer import CudaTransfer, cuda, lane
from tests.fake_streams import Fence
from tests.transfer_scenes import SCENARIOS, SCENES, Bench

NAMES = [scenario.__name__ for scenario, _ in SCENARIOS]


@pytest.mark.parametrize("scenario", [scenario for scenario, _ in SCENARIOS], ids=NAMES)
def test_bytes_are_right_at_any_speed_of_the_streams(scenario: Callable[[Bench], bool]) -> None:
    bench = Bench()

    assert scenario(bench)
    assert bench.gpu.num_synchronized == 0, "the step was held up"


@pytest.mark.parametrize(("scenario", "fence"), SCENARIOS, ids=NAMES)
def test_bytes_are_wrong_without_the_fence(scenario: Callable[[Bench], bool], fence: Fence) -> None:
    """Else the test above would prove nothing."""
    assert not scenario(Bench(missing=frozenset([fence])))


# ---------------------------------------------------------------- each fence in the source

MUTANTS: dict[str, tuple[ModuleType, str, str]] = {
    "a copy overtakes everything": (lane, "self._stream.wait_event(event)", "pass"),
    "a copy overtakes the last fence": (
        cuda,
        "return self._fence, self._streams.current().record_event()",
        "return (self._streams.current().record_event(),)",
    ),
    "a copy overtakes the current stream": (
        cuda,
        "return self._fence, self._streams.current().record_event()",
        "return (self._fence,)",
    ),
    "a fence is none": (
        cuda,
        "self._fence = self._streams.current().record_event()\n\n    def drain",
        "pass\n\n    def drain",
    ),
    "the computation overtakes a load": (
        cuda,
        "self._streams.current().wait_event(event)",
        "pass",
    ),
    "the computation waits for the first layers only": (
        cuda,
        "lane.arrival(copy, group)",
        "lane.arrival(copy, 0)",
    ),
    "the computation is told that more layers are there": (
        cuda,
        "return self._ends[group] if is_load else len(self._group_of)",
        "return len(self._group_of)",
    ),
    "a load is known to nobody who waits": (cuda, "copy = self._by_op.get(op)", "copy = None"),
    "a layer group is there before its last part": (
        cuda,
        "ends_group=start + _PART_PIECES >= len(chosen)",
        "ends_group=start == 0",
    ),
    "a page is copied before it is loaded": (cuda, "if source in slots:", "if False:"),
    "a page is copied when its first layers are there": (
        cuda,
        "self._loads.arrival(self._by_op[load], self.num_layer_groups - 1)",
        "self._loads.arrival(self._by_op[load], 0)",
    ),
    "a copy is over when it begins": (lane, "copy.arrived[-1].query()", "True"),
    "a copy is over with its first layers": (
        lane,
        "copy.arrived[-1].query()",
        "copy.arrived[0].query()",
    ),
}
"""By what goes wrong: where, what is there, and what stands there instead."""


@pytest.mark.parametrize("name", MUTANTS)
def test_a_transfer_without_one_of_its_fences_is_noticed(name: str) -> None:
    module, there, instead = MUTANTS[name]
    source = inspect.getsource(module)
    assert source.count(there) == 1, "the mutant no longer fits the source"
    mutated = run_as_module(source.replace(there, instead), module.__name__)
    transfer_type = mutated.get("CudaTransfer")
    if transfer_type is None:  # the lane was mutated: a transfer on top of it
        around = inspect.getsource(cuda)
        transfer_type = run_as_module(around, cuda.__name__, Lane=mutated["Lane"])["CudaTransfer"]
    assert isinstance(transfer_type, type)

    scenes = [scenario for scenario, _ in SCENARIOS] + SCENES

    assert any(is_wrong(scene, transfer_type) for scene in scenes)


@pytest.mark.parametrize("scene", SCENES)
def test_a_scene_ends_well_with_all_fences(scene: Callable[[Bench], bool]) -> None:
    assert scene(Bench())


def is_wrong(scene: Callable[[Bench], bool], transfer_type: type[CudaTransfer]) -> bool:
    try:
        return not scene(Bench(transfer_type=transfer_type))
    except AssertionError:
        return True  # the fake GPU noticed


def run_as_module(source: str, name: str, **replaced: object) -> dict[str, object]:
    """Return what a module defines, with some of what it imports replaced."""
    scope: dict[str, object] = {"__name__": name}
    lines = source.replace(" = Lane(", " = _Lane(")
    exec(compile(lines, f"<mutant of {name}>", "exec"), scope)
    scope["_Lane"] = replaced.get("Lane", lane.Lane)
    return scope
