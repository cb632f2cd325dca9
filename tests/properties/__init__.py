"""Random models x random programs of hooks, against an oracle that is instrumented by hand.

Models: `modules` and `composites` are what they are made of; `models` draws them, as plain data; `structures` is nested
values. Programs: `places` draws where, `programs` what, `cases` a model with a program and the order of its events.
Worlds: `worlds` runs a case bare, `under_oracle` with recording and intervening written by hand (`oracle`),
`under_hookline` with hooks; `checks` compares. `properties` are the invariants, `fuzz` the long run, `shrinking` makes
a failing case small, `mutations` breaks the core on purpose, to test the tests.
"""
