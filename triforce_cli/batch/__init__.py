"""Many prompts for one loaded model: JSON lines in, JSON lines out."""

from triforce_cli.batch.runner import Batch

__all__ = ["Batch"]
