"""GPU kernels in Triton, which not every machine has: `kernels.choice` imports them where it is."""
