"""A draft without a cache (Gemma 4's assistant): its layers read its target's keys and values, and its rows join an
embedding of the target with a hidden row."""

from __future__ import annotations

from dataclasses import dataclass

from offload.config.matrices import Matrix


@dataclass(frozen=True)
class Assistant:
    """The parts beside its layers. target_size: the hidden size of its target. clusters: of its vocabulary, each of as
    many tokens, of which the `best` ones have logits, by the products of a row with a vector of each; 0: all tokens
    have some."""

    target_size: int
    clusters: int = 0
    best: int = 0

    def matrices(self, hidden_size: int) -> dict[str, Matrix]:
        """The matrices by their names: into its rows, out of them, and of the clusters' vectors."""
        found = {
            "pre_projection.weight": Matrix(hidden_size, 2 * self.target_size),
            "post_projection.weight": Matrix(self.target_size, hidden_size),
        }
        return found | ({CLUSTERS: Matrix(self.clusters, hidden_size)} if self.clusters else {})


CLUSTERS, ORDER = "masked_embedding.centroids.weight", "masked_embedding.token_ordering"
