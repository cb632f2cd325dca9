"""A window of the browser with a page in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlencode

READY = "performance.getEntriesByName('hookline ready')[0]?.startTime ?? 0"
SHOWN = "() => performance.getEntriesByName('hookline ready').length > 0 || document.querySelector('.failure')"

SWEEP = """(element, points) => {
const pixels = element.getContext('2d').getImageData(0, 0, element.width, element.height).data;
const frame = element.getBoundingClientRect(), tip = document.querySelector('.tip');
return points.flatMap(([x, y]) => {
  element.dispatchEvent(new MouseEvent('mousemove', {clientX: frame.left + x, clientY: frame.top + y}));
  if (tip.hidden) return [];
  const at = 4 * (y * element.width + x), red = pixels[at] - pixels[at + 2];
  const said = tip.querySelector('b[data-value]').dataset.value, error = tip.querySelector('.error');
  return [[tip.querySelector('.tip-title').textContent, said === 'NaN' ? null : Number(said), red,
    error ? Number(error.textContent.replace(' ± ', '').replace('−', '-')) : 0]];
})}"""


STATE = """parts => {
const found = new URLSearchParams(location.hash.slice(1));
return Object.entries(parts).every(([name, value]) => found.get(name) === value);
}"""

BOXES = """all => all.map(one => {
const {x, y, width, height} = one.getBoundingClientRect();
return {x, y, width, height};
})"""

# The effect of a key may come a little later: a dialog reports its end in a separate task.
SETTLED = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))"


class Window:
    """One page, opened as a user would, with the errors it logged and the URLs it requested.

    A window shows one page after another: making a window takes longer than opening most pages.
    """

    def __init__(self, browser: Any) -> None:
        self.page = browser.new_context().new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.address = ""
        self.page.on(
            "console", lambda message: message.type in ("error", "warning") and self.errors.append(message.text)
        )
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.errors.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self.note(request.url))

    def open(self, path: Path, scheme: str = "light", size=(1440, 900), **state: Any) -> None:
        """Open a page, with `state` in its address."""
        self.page.set_viewport_size({"width": size[0], "height": size[1]})
        self.page.emulate_media(color_scheme=scheme)
        self.address = path.resolve().as_uri()
        self.page.goto(self.address + (f"#{urlencode(state)}" if state else ""))
        self.page.wait_for_function(SHOWN)

    def leave(self) -> tuple[list[str], list[str]]:
        """Forget the page, what it stored and where the mouse was; return its errors and the URLs it requested."""
        self.page.evaluate("localStorage.clear()")
        self.page.goto("about:blank")
        self.page.mouse.move(-1, -1)
        found = self.errors, self.requests
        self.errors, self.requests = [], []
        return found

    def note(self, url: str) -> None:
        if not url.startswith("data:"):
            self.requests.append(url.partition("#")[0])

    @property
    def ready(self) -> float:
        """The milliseconds until the page was usable."""
        return self.page.evaluate(READY)

    def wait_for_state(self, **parts: str | None) -> None:
        """Wait until the address has these parts, or lacks those that are None: it follows a little after many keys."""
        self.page.wait_for_function(STATE, arg=parts)

    @property
    def hash(self) -> str:
        return self.page.evaluate("location.hash")

    @property
    def heading(self) -> str:
        """The name of the selected site or module, or "" in the overview."""
        heading = self.page.locator("main .heading h2")
        return heading.text_content() if heading.count() else ""

    @property
    def rows(self) -> list[str]:
        """The names in the visible part of the tree."""
        return self.page.locator(".tree .row .name").all_text_contents()

    def row(self, name: str) -> Any:
        """Return the row of a site or module."""
        return self.page.locator(f'.tree .row[data-name="{name}"]')

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_text_contents()

    def boxes(self, selector: str) -> list[dict[str, float]]:
        """Where each such element is, all in one question to the browser."""
        return self.page.eval_on_selector_all(selector, BOXES)

    def search(self, text: str) -> str:
        """Type a search; return the page's status text."""
        self.page.fill("#search", text)
        return self.page.text_content(".search-status")

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)
        self.page.evaluate(SETTLED)

    def matches(self, text: str) -> list[str] | None:
        return self.page.evaluate("text => window.hookline.matches(text)", text)

    def hover(self, selector: str, x: float, y: float) -> None:
        """Move the mouse to a point in an element."""
        element = self.page.locator(selector).first
        element.scroll_into_view_if_needed()
        box = element.bounding_box()
        self.page.mouse.move(box["x"] + x, box["y"] + y)

    def sweep(self, selector: str, points: list[tuple[float, float]]) -> list[tuple[str, float, int, float]]:
        """Move the mouse to many points: return each place, the first run's value, how red it is, and its error."""
        return [tuple(one) for one in self.page.eval_on_selector(selector, SWEEP, points)]

    def tip(self) -> tuple[str, list[float]]:
        """Return the contents of the box at the cursor: the place, and the value of each run."""
        values = self.page.eval_on_selector_all(
            ".tip b[data-value]", "all => all.map(one => Number(one.dataset.value))"
        )
        return self.page.text_content(".tip .tip-title"), values
