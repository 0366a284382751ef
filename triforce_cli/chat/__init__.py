"""A conversation with a model: what was said, and the tokens it becomes."""
