"""Captured values: in memory, moved to disk, and saved to a file."""
