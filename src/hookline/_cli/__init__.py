"""The commands of `hookline`, one file each: a function's docstring is the help text, its parameters the options."""
