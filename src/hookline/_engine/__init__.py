"""The only code that touches a model: actions, and how values reach them."""
