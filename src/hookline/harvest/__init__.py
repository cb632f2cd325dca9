"""A model over a dataset, into a store."""
