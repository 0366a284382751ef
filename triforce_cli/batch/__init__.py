"""Many prompts for one loaded model: JSON lines in, JSON lines out, in the same order."""

from triforce_cli.batch.runner import Batch

__all__ = ["Batch"]
