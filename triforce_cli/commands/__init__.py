"""One module per command, a function that does its work. Its parameters are its options; see options/flags.py."""
