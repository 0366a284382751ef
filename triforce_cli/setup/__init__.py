"""Models and an engine, from options."""
