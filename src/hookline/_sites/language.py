"""The site language: a `Site` is one place in a model, a `Pattern` is text that names one or several.

    path [#calls] [.method() or /function] [#calls] [:port] [subscripts]        h.3#2/softmax#1:input[:, -1]

Text is parsed here, once, and never evaluated. `resolve.py` finds the places in a model that a pattern matches.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn, TypeVar

from hookline._sites.calls import Calls, Wanted, read_calls
from hookline._values.nested import STAR, subscript_text
from hookline._values.tokens import Tokens, read_tokens, without_rows
from hookline.errors import SiteError, did_you_mean

PORTS = ("output", "input", "inputs", "grad_output", "grad_input", "grad_inputs", "param")
LONGEST_TEXT = 4096
LONGEST_ROWS = 1 << 20  # With the tokens of each row, of which a large batch has many.
LARGEST_INTEGER = 2**31
MOST_ALTERNATIVES = 1024

_SPECIAL = re.compile(r"[\\*{}\[\]:#/()]")
_TOKEN = re.compile(
    r"\s*(?:(-?\d+)|(\.\.\.)|(None)|(\*)|(:)|(,)|(\])|(\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'))", re.DOTALL
)
_PLAIN = re.compile(r"[^.:\[#/(*{\\]+")
_MEMBER = re.compile(r"[\w*{},]+")
_NAMES = re.compile(r"(?:\[\s*(?:\d+|\*|\"\w+\"|'\w+')\s*\])+")  # Subscripts that could be names of modules.


Alternatives = tuple[tuple[str, ...], ...]  # The alternatives of one name, each split at its `*`s.
Segments = tuple[Alternatives | None, ...]  # The alternatives of each name; None is `**`.
_GRADIENTS = (
    "; did you mean 'grad_output' or 'grad_input'? The gradient of a parameter is its .grad, once backward() has run"
)
_CALLS = (
    "'#' takes the number of a call, from 0; for several '#1:', '#:3' or '#{0,2}', for each '#*', for the latest '#-1'"
)
Place = TypeVar("Place", bound=tuple[Any, ...])
_ANY_NAME = (("", ""),)  # A `*` alone.
_ROOT = ((("",),),)  # The path of the model itself.


class Site(NamedTuple):
    """One place in a model where a value passes.

    >>> Site.parse("h.3:inputs['mask'][:,-1]")
    Site('h.3:inputs["mask"][:, -1]')
    """

    path: str
    port: str = "output"
    index: str = ""  # type: ignore[assignment]  # Hides tuple.index, which a site does not need.
    call: Wanted = None
    member: str = ""  # A method, "split_heads()", or a function, "/softmax".
    within: Wanted = None  # The calls of the module in which the member is called.

    @staticmethod
    def parse(text: str) -> Site:
        """Read the text of one site; wildcards in the path are refused."""
        if not isinstance(text, str):  # `parse` is cached, and this may not be hashable.
            raise SiteError(f"a site is text, not {type(text).__name__}")
        pattern = parse(text)
        if pattern.path is None:
            raise SiteError(f"{text!r} has a wildcard and names no single site; hl.sites(model, {text!r}) lists them")
        return pattern.at(pattern.path)

    @property
    def subscripts(self) -> tuple[Any, ...]:
        """The subscripts as Python objects."""
        return parse_subscripts(self.index)

    @property
    def is_gradient(self) -> bool:
        """True if a gradient passes here, False for a value."""
        return self.port.startswith("grad")

    @property
    def method(self) -> str:
        """The name of the method, or ""."""
        return self.member[:-2] if self.member.endswith("()") else ""

    @property
    def function(self) -> str:
        """The name of the function, or a pattern of names, or ""."""
        return self.member[1:] if self.member.startswith("/") else ""

    def __str__(self) -> str:
        return text_of(self)

    def __repr__(self) -> str:
        return f"Site({str(self)!r})"


class SiteOnDemand:
    """An attribute `site` that is made of the attributes `path` and `port` when somebody asks for it, which is rare."""

    def __get__(self, holder: Any, _kind: type | None = None) -> Site:
        site = holder.site = Site(holder.path, holder.port)
        return site


class Pattern(NamedTuple):
    """A parsed text: which modules (`path`, or `segments` if there are wildcards), and which place at each."""

    text: str
    path: str | None
    segments: Segments
    port: str = "output"
    index: str = ""  # type: ignore[assignment]
    call: Wanted = None
    member: str = ""
    within: Wanted = None

    def at(self, path: str) -> Site:
        """Return this place at the module `path`."""
        return Site(path, *self[3:])

    def matches(self, path: str) -> bool:
        """Return True if the wildcards match this module path; linear in its length."""
        if self.member.endswith("()"):  # The method counts as a name: `**.encode()` may be a method of the model.
            return _match_names([*filter(None, path.split(".")), self.member], (*self.segments, _ANY_NAME))
        if not path or (None not in self.segments and path.count(".") != len(self.segments) - 1):
            return False
        return _match_names(path.split("."), self.segments)

    def choose(self, places: list[Place]) -> list[Place]:
        """Return the places whose paths match; each place begins with its path."""
        match = None if self.member.endswith("()") else _regex(self.segments)
        if match is None:
            return [place for place in places if self.matches(place[0])]
        return [place for place in places if match(place[0])]

    def means(self, site: Site) -> bool:
        """Return True if a site matches: path and member by the wildcards, port, call and subscripts exactly."""
        same_place = self.matches(site.path) and matches_name(site.member, self.member)
        return same_place and self.at(site.path)._replace(member=site.member) == site

    def beyond(self, site: Site) -> tuple[Any, ...] | None:
        """Return the subscripts of this pattern beyond those of a site; None if the site does not match."""
        same_path = site.path == self.path if self.path is not None else self.matches(site.path)
        asked, had = parse_subscripts(self.index), site.subscripts
        if not same_path or self.port != site.port or not _means_call(self.call, site.call):
            return None
        if not _means_call(self.within, site.within) or not matches_name(site.member, self.member):
            return None
        return asked[len(had) :] if all(map(_means, asked, had)) and len(asked) >= len(had) else None


def _means_call(asked: Wanted, had: Wanted) -> bool:
    """Return True if the calls of a site are among those that a pattern means."""
    return asked is None or asked == had or (isinstance(asked, Calls) and isinstance(had, int) and had in asked.numbers)


def _means(asked: Any, had: Any) -> bool:
    """Return True if a subscript of a pattern is that of a site; `*` is any index."""
    if asked is STAR or asked == had:
        return True
    both = isinstance(asked, tuple) and isinstance(had, tuple) and len(asked) == len(had)
    return both and all(map(_means, asked, had))


@lru_cache(maxsize=16384)
def text_of(site: Site) -> str:
    """Return the one canonical text of a site."""
    call = "" if site.call is None else f"#{site.call}"
    port = "" if site.port == "output" else f":{site.port}"
    module = _SPECIAL.sub(r"\\\g<0>", site.path) + ("" if site.within is None else f"#{site.within}")
    dot = "." if module and site.method else ""
    return module + dot + site.member + call + port + site.index


PARAM_ALONE = "':param' is a parameter as it is read: it has no calls and no members"


@lru_cache(maxsize=4096)
def parse(text: str) -> Pattern:
    """Read one text of the site language."""
    if not isinstance(text, str):
        raise SiteError(f"a site is text, not {type(text).__name__}")
    if len(text) > LONGEST_TEXT and (len(text) > LONGEST_ROWS or len(without_rows(text)) > LONGEST_TEXT):
        raise SiteError(f"a site of {len(text)} characters; at most {LONGEST_TEXT} are read")
    segments, position = _parse_path(text)
    call, position = _parse_calls(text, position)
    member, within = "", None
    if text[position : position + 1] in ("/", ".", "("):
        segments, member, position = _parse_member(text, position, segments)
        within, (call, position) = call, _parse_calls(text, position)
    port, position = _parse_port(text, position)
    before = position
    index, position = _parse_index(text, position)
    if call is None:
        call, position = _parse_calls(text, position)
    if position < len(text):
        _refuse(text, position, f"unexpected {text[position]!r}{_hint(text, position, before, member)}")
    if port == "param" and (member or call is not None):
        _refuse(text, text.index(":param"), PARAM_ALONE)
    if "@" in index:
        _refuse_tokens(text, before, port, index)
    literal = all(names is not None and len(names) == 1 and len(names[0]) == 1 for names in segments)
    path = ".".join(names[0][0] for names in segments if names) if literal else None
    return Pattern(text, path, segments, port, index, call, member, within)


def _hint(text: str, position: int, index: int, member: str) -> str:
    """Return a hint for text that goes on at `position`, where it should end. Its subscripts begin at `index`."""
    mark, subscripts, rest = text[position], text[index:position], text[position:]
    if member[:1] == "/" and mark in ".(":
        return ": a function is named alone, as in '/softmax'"
    if mark == "." and subscripts:
        if not _NAMES.fullmatch(subscripts):  # A negative number or a slice can't be a module's name.
            return ": a module is named with dots, by its own number or name, not by subscripts"
        dotted = re.sub(r"[^\w*]+", ".", subscripts).rstrip(".")
        return f": a module is named with dots, as in {text[:index] + dotted + rest!r}"
    if mark == ":" and subscripts:
        return f": the port comes before the subscripts: {text[:index] + rest + subscripts!r}"
    return ""


@lru_cache(maxsize=4096)
def alternatives_of(name: str) -> Alternatives:
    """Return the alternatives in the name of a method or a function, which may have wildcards."""
    names, end = _parse_name(name, 0)
    if end < len(name) or names is None:
        raise SiteError(f"{name!r} is not a name, nor a pattern of names")
    return names


def is_pattern(name: str) -> bool:
    """Return True if a name has wildcards."""
    return "*" in name or "{" in name


def matches_name(name: str, pattern: str) -> bool:
    """Return True if a name matches a pattern: the name of a method or function, which may have wildcards."""
    if name == pattern or not is_pattern(pattern):
        return name == pattern
    mark = "/" if pattern[0] == "/" else ""  # How the member of a site marks a function.
    return name.startswith(mark) and match_name(name.removeprefix(mark), alternatives_of(pattern.removeprefix(mark)))


@lru_cache(maxsize=4096)
def parse_subscripts(index: str) -> tuple[Any, ...]:
    """Return the Python subscripts that the text of an index stands for."""
    found = []
    position = 0
    while position < len(index):
        subscript, position = _parse_subscript(index, position)
        found.append(subscript)
    return tuple(found)


def write_subscripts(subscripts: tuple[Any, ...]) -> str:
    """Return the canonical text of subscripts."""
    return "".join(map(subscript_text, subscripts))


def _refuse(text: str, position: int, problem: str) -> NoReturn:
    raise SiteError(f"{problem}\n    {text}\n    {' ' * position}^")


def _parse_path(text: str) -> tuple[Segments, int]:
    """Read names up to the first mark; return the alternatives of each name, and where the path ends."""
    segments: list[Alternatives | None] = []
    position = -1
    while True:
        names, position = _parse_name(text, position + 1)
        segments.append(names)
        if text[position : position + 1] != ".":
            return tuple(segments), position


def _parse_name(text: str, position: int) -> tuple[Alternatives | None, int]:
    """Read one name of a path; return its alternatives, None for `**`, and where it ends."""
    alternatives = [[""]]  # Each alternative is the pieces of literal text between its `*`s.
    stars = 0
    while True:
        character = text[position : position + 1]
        if character in ("", ".", ":", "[", "#", "/", "("):
            is_deep = stars == 2 and alternatives == [["", "", ""]]
            return None if is_deep else _finish(text, alternatives, stars), position
        if character == "*":
            stars += 1
            alternatives = [[*pieces, ""] for pieces in alternatives]
        elif character == "{":
            alternatives, position = _parse_braces(text, position, alternatives)
        elif character == "\\" and position + 1 < len(text):
            position += 1
            _append(alternatives, text[position])
        else:
            plain = _PLAIN.match(text, position)
            run = plain.group() if plain else character
            _append(alternatives, run)
            position += len(run) - 1
        position += 1


def _parse_member(text: str, position: int, segments: Segments) -> tuple[Segments, str, int]:
    """Read `/function` or `.method()`, or the `()` of a method whose name was read as the last name of the path."""
    mark = text[position]
    if mark == "(":
        start, segments = text.rfind(".", 0, position) + 1, segments[:-1] or _ROOT
    else:
        start = position + 1
        position = _parse_name(text, start)[1]
    name = re.sub(r"(?<=[{,])\s+|\s+(?=[},])", "", text[start:position])
    if not _MEMBER.fullmatch(name) or "**" in name:
        _refuse(text, start, "a function or method has a plain name, as in 'h.3/softmax', 'h.3/*', 'h.3.split_heads()'")
    if mark == "/":
        return segments, f"/{name}", position
    if text[position : position + 2] != "()":
        _refuse(text, position, "a method is written with '()', as in 'h.3.split_heads()'")
    return segments, f"{name}()", position + 2


def _finish(text: str, alternatives: list[list[str]], stars: int) -> tuple[tuple[str, ...], ...]:
    if stars > 1 and any("" in pieces[1:-1] for pieces in alternatives):
        raise SiteError(f"{text!r}: '**' stands alone between dots, as in 'h.**' or '**.mlp'")
    return tuple(tuple(pieces) for pieces in alternatives)


def _parse_braces(text: str, position: int, alternatives: list[list[str]]) -> tuple[list[list[str]], int]:
    end = text.find("}", position)
    if end < 0:
        _refuse(text, position, "'{' is not closed")
    choices = [choice.strip() for choice in text[position + 1 : end].split(",")]
    longest = max(map(len, choices)) + max(sum(map(len, pieces)) for pieces in alternatives)
    if len(choices) * len(alternatives) * (longest // 64 + 1) > MOST_ALTERNATIVES:
        _refuse(text, position, f"more than {MOST_ALTERNATIVES} alternatives")
    if any(not choice or _SPECIAL.search(choice) or "." in choice for choice in choices):
        _refuse(text, position, "'{...}' takes plain names between commas, as in 'h.{0,3}'")
    return [[*pieces[:-1], pieces[-1] + choice] for pieces in alternatives for choice in choices], end


def _append(alternatives: list[list[str]], text: str) -> None:
    for pieces in alternatives:
        pieces[-1] += text


def _parse_calls(text: str, position: int) -> tuple[Wanted, int]:
    if text[position : position + 1] != "#":
        return None, position
    calls, end = read_calls(text[position + 1 :])
    if calls is None:
        _refuse(text, position, f"'{text[position : position + 1 + end]}' names no call" if end else _CALLS)
    end += position + 1
    if text[end : end + 1] in ("-", ","):
        _refuse(text, end, _CALLS)
    return calls, end


def _parse_port(text: str, position: int) -> tuple[str, int]:
    if text[position : position + 1] != ":":
        return "output", position
    match = re.compile(r"\w*").match(text, position + 1)
    name = match.group() if match else ""
    if name not in PORTS:
        by_name = f"; an argument by its name is ':inputs[\"{name}\"]'" if name else ""
        near = _GRADIENTS if name.startswith("grad") else did_you_mean(name, PORTS) or f": {', '.join(PORTS)}{by_name}"
        _refuse(text, position, f"{name!r} is not a port{near}")
    return name, position + 1 + len(name)


def _parse_index(text: str, position: int) -> tuple[str, int]:
    found = []
    while text[position : position + 1] == "[":
        subscript, position = _parse_subscript(text, position)
        found.append(subscript)
    return write_subscripts(tuple(found)), position


def _refuse_tokens(text: str, position: int, port: str, index: str) -> None:
    """Raise if tokens are named twice, or at a parameter."""
    items = [item for one in parse_subscripts(index) for item in (one if isinstance(one, tuple) else (one,))]
    named = sum(isinstance(item, Tokens) for item in items)
    if named > 1:
        _refuse(text, position, "a site names its tokens once")
    if named and port == "param":
        _refuse(text, position, "a parameter has no tokens")


def _parse_subscript(text: str, position: int) -> tuple[Any, int]:
    """Read one `[...]`; return a single item as it is, several as a tuple."""
    items: list[Any] = []
    parts: list[Any] = []  # The item being read, with the colons of a slice in it.
    start, position = position, position + 1
    while True:
        match = _TOKEN.match(text, position)
        if match is None and text[position:].lstrip()[:1] == "@":
            tokens, end, problem = read_tokens(text, position + len(text[position:]) - len(text[position:].lstrip()))
            if tokens is None:
                _refuse(text, position, problem)
            parts.append(tokens)
            position = end
            continue
        if match is None:
            position += len(text[position:]) - len(text[position:].lstrip())
            key = re.match(r"[^\W\d]\w*(?=\s*\])", text[position:])
            hint = f'; a key is quoted: ["{key.group()}"]' if key else ""
            if text.startswith("[", position):
                hint = "; several positions are several sites, as in '[:, 0]' and '[:, 2]'"
            _refuse(
                text,
                position,
                f"not a subscript: use integers, slices, '...', None, '*', '@' for tokens, or quoted keys{hint}",
            )
        token, kind = match.group().strip(), match.lastindex
        if kind in (6, 7):  # A comma or the closing bracket.
            items.append(_finish_item(text, start, parts))
            parts = []
            if kind == 7:
                return _finish_subscript(text, start, items), match.end()
        else:
            parts.append(_read_token(text, position, token, kind or 0))
        position = match.end()


def _read_token(text: str, position: int, token: str, kind: int) -> Any:
    if kind == 1:
        if abs(int(token)) >= LARGEST_INTEGER:
            _refuse(text, position, "an index of 2**31 or more")
        return int(token)
    if kind == 8:
        return re.sub(r"\\(.)", r"\1", token[1:-1], flags=re.DOTALL)
    return {2: Ellipsis, 3: None, 4: STAR, 5: _COLON}[kind]


_COLON = object()


def _finish_item(text: str, start: int, parts: list[Any]) -> Any:
    if _COLON not in parts:
        if len(parts) != 1:
            several = (
                "; several names are written with braces, as in 'h.{0,1,2}'" if text[start - 1 : start] == "." else ""
            )
            _refuse(text, start, ("an empty subscript" if not parts else "a comma is missing") + several)
        return parts[0]
    bounds: list[int | None] = [None]
    for part in parts:
        if part is _COLON:
            bounds.append(None)
        elif isinstance(part, int) and bounds[-1] is None:
            bounds[-1] = part
        else:
            _refuse(text, start, "not a slice")
    if len(bounds) > 3 or 0 in bounds[2:]:
        _refuse(text, start, "not a slice")
    return slice(*bounds)


def _finish_subscript(text: str, start: int, items: list[Any]) -> Any:
    if len(items) > 1 and any(isinstance(item, str) for item in items):
        _refuse(text, start, "a key stands alone in its brackets")
    if items.count(Ellipsis) > 1:
        _refuse(text, start, "more than one '...'")
    return items[0] if len(items) == 1 else tuple(items)


@lru_cache(maxsize=4096)
def _regex(segments: Segments) -> Callable[[str], object] | None:
    """Return a regular expression for wildcards, which is faster than `_match_names`.

    Return None for several gaps in one name, or several `**`: a regular expression could try them in very many ways.
    """
    if segments.count(None) > 1 or any(len(pieces) > 2 for names in segments for pieces in names or ()):
        return None
    *above, last = [None if names is None else _regex_of_name(names) for names in segments]
    parts = [r"(?:[^.]+\.)*" if one is None else rf"{one}\." for one in above]
    return re.compile("".join([*parts, r"[^.]+(?:\.[^.]+)*" if last is None else last])).fullmatch


def _regex_of_name(alternatives: Alternatives) -> str:
    return f"(?:{'|'.join('[^.]+'.join(map(re.escape, pieces)) for pieces in alternatives)})"


def _match_names(names: list[str], segments: Segments) -> bool:
    """Match names against segments with two pointers; a last `**` takes at least one name, any other may take none."""
    if segments[-1] is None:
        segments = (*segments[:-1], _ANY_NAME, None)
    name = segment = 0
    restart: tuple[int, int] | None = None
    while name < len(names):
        if segment < len(segments) and segments[segment] is None:
            restart = (segment, name)
            segment += 1
        elif segment < len(segments) and match_name(names[name], segments[segment] or ()):
            name, segment = name + 1, segment + 1
        elif restart is not None:
            restart = (restart[0], restart[1] + 1)
            segment, name = restart[0] + 1, restart[1]
        else:
            return False
    return all(left is None for left in segments[segment:])


def match_name(name: str, alternatives: Alternatives) -> bool:
    """Return True if a name matches one of the alternatives."""
    if alternatives == _ANY_NAME:
        return True
    return any(name == pieces[0] if len(pieces) == 1 else _match_pieces(name, pieces) for pieces in alternatives)


def _match_pieces(name: str, pieces: tuple[str, ...]) -> bool:
    """Return True if the pieces occur in this order, from start to end, with at least one character in each gap."""
    first, *middle, last = pieces
    if not (name.startswith(first) and name.endswith(last)):
        return False
    position = len(first)
    for piece in middle:
        position = name.find(piece, position + 1)
        if position < 0:
            return False
        position += len(piece)
    return position + 1 <= len(name) - len(last)
