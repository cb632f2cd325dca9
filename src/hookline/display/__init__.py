"""Something to look at: pictures of values, and the explorer page."""
