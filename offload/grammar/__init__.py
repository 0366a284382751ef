"""Constraints: JSON schemas, grammars and choices, as the tokens that are allowed next."""
