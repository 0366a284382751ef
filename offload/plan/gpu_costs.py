"""Constants of the prices of passes: a GPU's, besides its rates, and those of a refresh."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuCosts:
    """Constants of GPUs, besides their rates: estimated from the number of kernels. Calls return before the device is
    done, so the longer of calls and work counts."""

    pass_seconds: float = 5e-4  # calls of one pass outside its layers, the draw
    layer_seconds: float = 3e-4  # calls of one layer
    sequence_seconds: float = 1e-4  # of one layer, for each further sequence: to take rows in and attend
    tile_seconds: float = 2.3e-4  # calls of one block over one tile
    read_share: float = 0.9  # of the rate of reading, at which one row runs over weights and cache
    coded_share: float = 0.75  # the same over quantised weights: two short launches for each product
    row_share: float = 0.01  # of the seconds of one row, what each further row of a block adds
    mass_share: float = 0.05  # of the seconds of a pass, what keeping its masses adds
    prefill_share: float = 0.5  # of the rate of large products


@dataclass(frozen=True)
class RefreshCosts:
    """Of what the retrieval cache holds: share of the rate of reading, at which it is chosen and fetched, and seconds
    of the calls for one layer."""

    share: float
    layer_seconds: float


GPU = GpuCosts()
CPU_REFRESH = RefreshCosts(0.32, 1.6e-4)
GPU_REFRESH = RefreshCosts(0.5, 0.0)  # by a kernel of the GPU: what crosses the link is counted by itself
GATHERED_REFRESH = RefreshCosts(0.02, 0.0)  # by the host, which gathers chunks for a GPU without kernels
