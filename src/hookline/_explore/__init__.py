"""`hl.explore`: the data of a page for browsing the values of a model. The page itself is built from explorer/."""
