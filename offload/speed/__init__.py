"""The speed of this machine: rates, curves, measured seconds. Imports no torch."""
