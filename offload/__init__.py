"""The engine: exact hierarchical speculative decoding with weights and KV cache off the device."""
