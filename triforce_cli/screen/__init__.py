"""The terminal: output, progress, wrapped words."""
