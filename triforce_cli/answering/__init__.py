"""Answers: from the wanted settings and the prompt's tokens to the parts of the generated text."""
