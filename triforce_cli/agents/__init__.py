"""Coding agents of others, run with this program's server for one time."""
