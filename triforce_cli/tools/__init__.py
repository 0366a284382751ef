"""Tool calls as models write them, and the grammar that allows no others."""
