"""One test, or a few, for each known way in which hooks go wrong. Its docstring begins with the way's number:
A lifecycle, B structure, C values, D gradients, E compilers and copies, F threads, G memory, H site texts, I files.
"""
