"""Nested values: read and replace parts, copy values, fit one to another, describe them."""
