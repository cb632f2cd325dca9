"""`hl.sweep`: measure a model with one place at a time changed."""
