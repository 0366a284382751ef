"""Encodings of blocks of numbers: their layout, and the functions that encode and decode them, on a CPU and on a
GPU."""
