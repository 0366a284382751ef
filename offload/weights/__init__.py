"""A model's weights: read from its checkpoint, laid out layer by layer, at home on the device or the host, streamed."""
