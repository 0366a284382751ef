"""Code that runs on the devices themselves, and how Python calls it: C++ for CPUs, Triton for GPUs."""
