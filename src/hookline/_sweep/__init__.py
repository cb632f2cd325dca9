"""One measurement with one place after the other changed."""
