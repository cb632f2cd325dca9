"""HOW: the only code that touches a model."""
