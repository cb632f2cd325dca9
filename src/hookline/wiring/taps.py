"""A tap: one action at one site of one module, and when it acts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from hookline.actions import Action, Apply, Call, Save, Set, Skip, Stop
from hookline.context import RESTING, Blocks
from hookline.errors import HooklineError
from hookline.records import Record, Session
from hookline.sites import Site, write_subscripts
from hookline.tree import Children
from hookline.values import STAR, expand, get, put, split

if TYPE_CHECKING:
    from hookline.wiring.modules import Watch

NO_BLOCKS: Blocks = frozenset()


class Tap:
    """One action at one site. It acts everywhere while `active`, and in the blocks that hold it.

    What is the same for every new tap stands on the class: one is made for each hooked module.
    """

    record: Record | None = None
    siblings: Children | None = None  # Where its module was found: by this a replaced one is noticed.
    subscripts: tuple[Any, ...] = ()
    star = False
    copies_on_write = False  # Whether nothing but that is asked of its capture.
    is_plain = False  # Whether it captures the whole output, by default: see the hot path in modules.py.
    active = False
    blocks = NO_BLOCKS
    watch: Watch | None = None  # While it is attached.
    removed = False
    order = 0  # Taps of one module act in this order.
    count = 0  # Calls of the module since the hooks were attached or entered.
    fired = False
    has_warned = False  # Of a gradient that can't come.

    def __init__(self, site: Site, module: nn.Module, action: Action, session: Session, exact: bool, name: str) -> None:
        self.site = site
        self.module = module
        self.action = action
        self.session = session
        self.exact = exact
        self.name = name
        if site.index:
            self.subscripts = site.subscripts
            self.star = "*" in site.index and any(
                STAR in (one if isinstance(one, tuple) else (one,)) for one in self.subscripts
            )

    def acts(self, here: Blocks) -> bool:
        """Whether this tap acts where these blocks are open."""
        return not self.blocks.isdisjoint(here) or (self.active and RESTING not in here)

    @property
    def changes(self) -> bool:
        """Whether it may change what passes, or has to be there again when a forward is recomputed."""
        return not isinstance(self.action, (Save, Stop)) or self.site.is_gradient

    @property
    def is_traceable(self) -> bool:
        """Whether dynamo can trace it: nothing to count, nothing to raise, no tensor hook."""
        action, site = self.action, self.site
        if site.is_gradient or site.call is not None or self.star:
            return False
        if isinstance(action, Save):
            return action.detach and self.record is not None and self.record.keep == 1
        return isinstance(action, (Set, Skip)) or (isinstance(action, Apply) and not action.with_call)

    def act(self, value: Any, call: Call, stamp: Any) -> Any:
        """Take the part that the subscripts name, give it to the action, put what comes back in its place."""
        self.fired = True
        action = self.action
        try:
            if isinstance(action, Save):
                self._save(action, value, stamp)
                return value
            if not self.subscripts:
                return action(value, call, True)  # type: ignore[operator]
            for subscripts in expand(value, self.subscripts) if self.star else (self.subscripts,):
                whole, rest = split(value, subscripts)
                part = get(whole, rest)
                new = action(part, call, not rest)  # type: ignore[operator]
                value = value if new is part else put(value, subscripts, new)
            return value
        except Exception as error:
            blame(self.site, error)

    def trace(self, value: Any) -> Any:
        """Act inside a graph that dynamo is tracing: no counting, no clock, no other thread."""
        self.fired = True
        action = self.action
        whole, rest = split(value, self.subscripts)
        part = get(whole, rest)
        if isinstance(action, Save):
            self.record.value = action.keep_part(part, False)  # type: ignore[union-attr]
            self.record.is_traced = True  # type: ignore[union-attr]
            return value
        new = action(part, None, not rest)  # type: ignore[operator]
        return value if new is part else put(value, self.subscripts, new)

    def _save(self, action: Save, value: Any, stamp: Any) -> None:
        if not self.subscripts:
            self.record_at(()).put(action.keep(value), stamp, self.session.forwards)
            return
        for subscripts in expand(value, self.subscripts) if self.star else (self.subscripts,):
            whole, rest = split(value, subscripts)
            part = get(whole, rest)
            if part is None and self.star:
                continue
            if part is None:
                raise HooklineError(f"None passes here: {type(self.module).__name__} did not make this value")
            self.record_at(subscripts).put(action.keep_part(part, bool(rest)), stamp, self.session.forwards)

    def record_at(self, subscripts: tuple[Any, ...]) -> Record:
        """Return the record of these subscripts: for a `[*]`, one for each index."""
        record = self.record
        assert record is not None
        if record.family is None:
            return record
        index = write_subscripts(subscripts)
        if index not in record.family:
            record.family[index] = Record(self.site._replace(index=index), record.keep)
        return record.family[index]


def blame(site: Site, error: Exception) -> NoReturn:
    """Raise an error that came up at a site: hookline's own with the site in it, a user's as it is with a note."""
    if isinstance(error, HooklineError) and not str(error).startswith("'"):
        raise type(error)(f"'{site}': {error}") from None
    if hasattr(error, "add_note") and not isinstance(error, HooklineError):  # Python 3.11.
        error.add_note(f"hookline: raised at '{site}'")
    try:
        raise error
    finally:
        del error  # Its traceback holds this frame, which would hold it, and with it the model.
