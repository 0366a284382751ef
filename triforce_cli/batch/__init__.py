"""Many prompts, one loaded model: lines in, lines out, in order."""

from triforce_cli.batch.runner import Batch

__all__ = ["Batch"]
