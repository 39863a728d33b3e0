"""Finds what would make the host wait for a GPU, on a CPU.

Two nets: calls of torch that read values (``item``, ``tolist``, ``numpy``, ``cpu``, a tensor as a
condition, a tensor made of a list on a device), and operations below them whose result has a size
that depends on values (``nonzero``, a mask as an index). Tensors on two devices in one operation,
other than a copy, are found too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READING = {
    "item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero",
    "masked_select", "unique", "equal", "allclose",
}  # fmt: skip

WAITING = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero",
    "aten::equal", "aten::_unique2", "aten::unique_consecutive", "aten::repeat_interleave.Tensor",
}  # fmt: skip


class NothingReadBack:
    """Within it, whatever would wait for a GPU raises ``AssertionError``."""

    def __init__(self) -> None:
        self._modes: list[Any] = [_Calls(), _operations()]

    def __enter__(self) -> None:
        for mode in self._modes:
            mode.__enter__()

    def __exit__(self, *error: object) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


class _Calls(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        assert name not in READING, f"{name} reads values back"
        assert func is not torch.tensor, "a tensor is made of a list"
        return func(*args, **(kwargs or {}))


def _check(name: str, args: Sequence[Any]) -> None:
    assert name not in WAITING, f"{name} waits for values"
    if name in ("aten::index.Tensor", "aten::index_put_", "aten::index_put"):
        for index in args[1]:
            is_mask = isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
            assert not is_mask, f"{name} by a mask waits for its number"
    if name not in ("aten::_to_copy", "aten::copy_"):
        devices = {arg.device.type for arg in args if isinstance(arg, Tensor) and arg.dim() > 0}
        assert len(devices) < 2, f"{name} is given tensors of {devices}"


def _operations() -> Any:
    base: Any = TorchDispatchMode  # which has no types

    class Operations(base):  # type: ignore[misc]
        def __torch_dispatch__(
            self,
            func: Any,
            types: Sequence[type],
            args: Sequence[Any] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:
            _check(func.name(), args)
            return func(*args, **(kwargs or {}))

    return Operations()
