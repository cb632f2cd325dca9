"""The commands of `hookline`, a file each: the function's docstring is the help, its parameters are the options."""
