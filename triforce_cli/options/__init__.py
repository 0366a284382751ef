"""Options of the command line, shared by commands."""
