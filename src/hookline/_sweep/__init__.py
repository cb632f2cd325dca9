"""`hl.sweep`: measure a model with one place after the other changed."""
