"""GPU kernels in Triton. `kernels.choice` imports them only where Triton is installed."""
