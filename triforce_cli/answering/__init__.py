"""An answer: from what is wanted of it and the prompt that the model reads to the parts of a text."""
