"""Hooks: add them, enter and leave their blocks, and report sites where nothing passed."""
