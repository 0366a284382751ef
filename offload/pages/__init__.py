"""The paged storage of keys and values, in tiles, and the copies between host and device."""
