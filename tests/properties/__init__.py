"""Random models x random programs of hooks, against an oracle that is instrumented by hand.

Models: `modules`, `composites`, `memories` (with their `containers`: state among the arguments) and `scripts` (with
their `steps`: torch functions, methods, parameters) are what they are made of; `models` draws them, as plain data;
`structures` is nested values. What a hook may see, they do through the `seams`. Programs: a `survey` of the model shows
what passes where; `places` draws where among its modules, `members` among what they hold and do; `programs` draws what,
`cases` a model with a program and the order of its events. Worlds: `worlds` runs a case bare, `under_oracle` with
recording and intervening written by hand (`oracle`, with its `watches`, `arguments`, the `lending` of containers and
torch's `layers` written out), `under_hookline` with hooks; `checks` compares. `properties` are the invariants, `fuzz`
the long run, `shrinking` makes a failing case small, `mutations` and `mutations_of_members` break the core on purpose,
to test the tests.
"""
