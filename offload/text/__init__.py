"""Tokens and texts: tokenizers, chat templates, whole characters, stop texts."""
