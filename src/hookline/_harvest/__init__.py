"""Run a model over a dataset, and store the values at some sites on disk."""
