"""A server of answers over HTTP: one thread runs the model, another one talks to clients."""
