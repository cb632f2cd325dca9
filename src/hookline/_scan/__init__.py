"""`hl.scan` and `hl.sites`: inspect a model without running it."""
