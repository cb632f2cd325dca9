"""One page to browse what passed in a model: its data, gathered and measured. The page is built from explorer/."""
