"""Settings of the user: the configuration, aliases, templates of prompts."""
