"""A conversation as a prompt: messages, templates, guards against markers in texts."""
