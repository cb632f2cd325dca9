"""Random models with random programs of hooks, compared with an oracle that is instrumented by hand.

Models: `random_models` draws models as plain data. Their modules are in `modules`, `composites`, `memories` (which take
`containers` as arguments) and `scripts` (whose `steps` use torch functions, methods and parameters). `structures` has
functions for nested values. Modules do everything that a hook may see through the functions in `seams`.

Programs: a `survey` of the model records which values pass at which sites. `places` draws sites at modules, `members`
draws methods, functions and parameters, and `programs` draws actions there. `cases` draws a model, a program for it and
the order of its events.

Worlds: `worlds` runs a case without hooks, and `under_hookline` with hooks. `under_oracle` runs it with the `oracle`,
which records and changes values by hand (with `watches`, `arguments`, the `lending` of containers, and torch's `layers`
written out). `checks` compares the runs.

`differ` runs cases on two sources of hookline, and compares the `observations`: all that a user could see of a case.

`properties` has the invariants and `fuzz` the long run. `shrinking` reduces a failing case.
"""
