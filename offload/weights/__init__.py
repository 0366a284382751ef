"""A model's weights: read from its checkpoint, laid out layer by layer, stored on the device or the host (their home),
and streamed."""
