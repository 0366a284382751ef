"""Native code for the devices, C++ for CPUs and Triton for GPUs, and its interface to Python."""
