"""Weights in 4 bits on a GPU on paper. No tests in here."""

from __future__ import annotations

import pytest
from torch import Tensor
from torch.nn.functional import linear

from offload.formats.quantised import Codes
from offload.kernels.gpu.kernels import GPU_KERNELS
from offload.weights import linear as products
from offload.worker import models


def codes_by_gpu(patch: pytest.MonkeyPatch, *, without_values: bool) -> None:
    """Rows are multiplied with them by the GPU: by torch's operators, or where tensors have no values by its kernels,
    which are launched."""
    patch.setattr(models, "gpu_kernels", lambda device: GPU_KERNELS)
    if not without_values:
        patch.setattr(products, "product", _product)


def _product(x: Tensor, weight: Tensor | Codes, bias: Tensor | None) -> Tensor:
    return linear(x, weight.matrix(x.dtype) if isinstance(weight, Codes) else weight, bias)
