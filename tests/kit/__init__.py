"""The rigs of tests: models, engines, commands, servers and numbers. No tests in here."""
