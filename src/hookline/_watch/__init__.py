"""`hl.watch`: stop at the first NaN, Inf or too large value in a model, and say which module or function made it."""
