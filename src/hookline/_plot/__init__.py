"""Plots of values: `cache.plot`, `store.plot` and `sweep.plot`."""
