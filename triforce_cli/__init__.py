"""The command line of triforce: arguments in, text out. It uses `offload.engine.engine` and `offload.plan`."""

__version__ = "0.1.0"
