"""`hl.watch`: stop at the first NaN, Inf or too large value of a model, and say what made it."""
