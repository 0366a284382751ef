"""Encodings of a block of numbers: how they lie, and who makes and reads them, on a CPU and on a GPU."""
