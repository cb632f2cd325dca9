"""The only code that touches a model: actions, and how they get to see a value."""
