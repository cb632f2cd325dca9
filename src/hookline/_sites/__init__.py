"""Sites: the language, a model's names, and what a pattern means in a model."""
