"""Modules that every room may use: text, files in and out, errors, the log."""
