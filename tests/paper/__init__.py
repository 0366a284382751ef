"""A CUDA device on paper, for tests of the GPU's schedule on a machine without one. No tests in here.

`on_paper()` makes torch believe in a GPU "cuda:0" whose tensors compute on the CPU. Streams and events are vector
clocks, so whatever is not ordered by them is reported, however it would have come out on a real GPU.
"""

from paper.gpu import PaperGpu, on_paper

__all__ = ["PaperGpu", "on_paper"]
