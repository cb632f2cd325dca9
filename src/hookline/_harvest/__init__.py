"""Run a model over a dataset, and keep what passes at some sites in a store on disk."""
