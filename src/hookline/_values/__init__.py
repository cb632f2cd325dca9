"""Nested values: get and put parts, copy them, fit one to another, describe them."""
