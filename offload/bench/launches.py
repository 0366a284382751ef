"""The kernels that a pass of each level launches on a GPU, which in a graph are one launch of the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from offload.model.passes import forward
from offload.native.launch import counting

if TYPE_CHECKING:
    from offload.engine.engine import Engine

_WHOLE = {"rms_norm"}  # one kernel, though it is made of others elsewhere
_NOTHING_RUNS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}


class _Operators(TorchDispatchMode):
    """Counts torch's operators that make or change a tensor on a GPU: one kernel or copy each."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        name, is_composite = func._schema.name.partition("::")[2], torch._C.DispatchKey.CompositeImplicitAutograd
        if func.has_kernel_for_dispatch_key(is_composite) and name not in _WHOLE:
            with self:
                return func.decompose(*args, **(kwargs or {}))
        made = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in returns)
        first = made[0] if isinstance(made, (list, tuple)) and made else made
        runs = isinstance(first, Tensor) and first.is_cuda and not is_view
        self.number += runs and name not in _NOTHING_RUNS
        return made


@torch.inference_mode()
def launches(engine: Engine) -> dict[str, int]:
    """Kernels and copies of a pass of one row of each level, by its name, over what its cache has now; nothing for a
    CPU or several GPUs. Each level gets a row, which is taken back; its graphs are dropped."""
    if engine.plan.request.device == "cpu" or engine.plan.request.num_devices > 1:
        return {}
    found = {}
    for name, level in engine.levels.items():
        length = level.length
        level.forget_graphs()
        with counting() as programs, _Operators() as operators:
            forward(level, [0], 1)
        level.truncate(length)
        found[name] = programs.total() + operators.number
    return found
