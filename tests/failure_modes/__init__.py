"""Tests for each known way in which hooks go wrong. A test's docstring begins with the number of its failure mode. The
letters mean: A lifecycle, B structure, C values, D gradients, E compilers and copies, F threads, G memory, H site
texts, I files.
"""
