"""`hl.explore`: the data of a page on which to browse what passed in a model. The page is built from explorer/."""
