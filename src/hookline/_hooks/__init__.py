"""Hooks and their life: adding, entering, leaving, and saying why nothing passed."""
