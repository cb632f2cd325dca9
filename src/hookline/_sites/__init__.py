"""Sites: the language, the names in a model, and the places that a pattern matches."""
