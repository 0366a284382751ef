"""Where the keys and values of tokens lie, page by page and tile by tile, and what moves them."""
