"""Looking at a model without running it."""
