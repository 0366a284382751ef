"""HTTP APIs of other programs for answers: their requests in our fields, our answers in their responses."""
