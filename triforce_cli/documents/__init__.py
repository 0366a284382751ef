"""Documents: from the paths that a person names to texts."""
