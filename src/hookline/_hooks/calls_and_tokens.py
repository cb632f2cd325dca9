"""What hooks may do at sites that name several calls, or tokens."""

from __future__ import annotations

from collections.abc import Iterable

from hookline._engine.capture_action import Save
from hookline._engine.tap import Tap
from hookline._sites.calls import Calls
from hookline._sites.language import Site
from hookline._sites.resolve import Found
from hookline._values.tokens import tokens_in
from hookline.errors import HooklineError, SiteError


def calls_at(tap: Tap, calls: int | None) -> int | None:
    """Return how many calls to keep at a site: all that it names, unless each is a site of its own."""
    site = tap.site
    if isinstance(site.within, Calls) and site.within.is_each:
        raise SiteError(f"'{site}': '#*' goes behind the function: '{site._replace(within=None, call=Calls('*'))}'")
    wanted = next((one for one in (site.call, site.within) if isinstance(one, Calls)), None)
    if wanted is None or tap.is_each:
        return calls
    if wanted.is_latest:
        if calls != 1:
            raise SiteError(f"'{tap.site}' is the latest call alone; leave keep= out, or '#-1'")
        return 1
    return None if calls == 1 else calls


def refuse_latest(places: Iterable[Found]) -> None:
    """Raise if a site of a change names the latest call or token: which that is is known only afterwards."""
    for place in places:
        site = place.site
        for wanted in (site.call, site.within):
            if isinstance(wanted, Calls) and wanted.is_latest:
                raise SiteError(
                    f"'{site}': which call is the latest is known only when no more come, too late to change it; "
                    "name it by its number, as in '#2', or all from one on, as in '#1:'"
                )
        tokens = tokens_in(site.subscripts) if "@" in site.index else None
        if tokens is not None and tokens.is_latest:
            raise SiteError(
                f"'{site}': while a sequence grows, each new token is the last for a moment; '@prompt[-1]' is the last "
                "token of the prompt, and '@new' are all new ones"
            )


def is_open_ended(site: Site) -> bool:
    """Return True if more calls or tokens of a site may always come."""
    for wanted in (site.call, site.within):
        if isinstance(wanted, Calls) and (wanted.last is None or wanted.is_latest):
            return True
    tokens = tokens_in(site.subscripts) if "@" in site.index else None
    return tokens is not None and tokens.part in ("", "new") and tokens.last is None


def refuse_options_of_tokens(places: Iterable[Found], action: Save, calls: int | None) -> None:
    """Raise if captures of tokens have an option that does not go with putting their calls together."""
    for place in places if action.budget is not None or action.transform is not None else ():
        tokens = tokens_in(place.site.subscripts) if "@" in place.site.index else None
        if tokens is None:
            continue
        if action.budget is not None:
            raise HooklineError(
                f"'{place.site}': tokens are put together in memory, so limit= can't be kept; leave it out"
            )
        if calls == 1 and not tokens.is_one:
            raise HooklineError(
                f"'{place.site}': transform= gets the tokens of each call by themselves; keep='all' keeps what it "
                "makes of each, cache.map(function) works on all of them"
            )
