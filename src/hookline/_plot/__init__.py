"""Pictures of values, and the numbers drawn for them."""
