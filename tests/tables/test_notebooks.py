"""HTML for notebooks: nested by module, escaped, with histograms of the values, and without side effects."""

from __future__ import annotations

import re
import time
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import hookline as hl
from hookline._stats import glimpse
from hookline._tables import Table
from hookline._tables.notebooks import MOST_ROWS
from tests.errors.wording import says
from tests.support.models import GPT, mlp, tokens

WITHOUT_END = {"path", "br", "hr", "img", "input", "meta", "link"}


class Checked(HTMLParser):
    """An HTML parser that checks that every tag is closed, and collects the depth and text of each row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags = set[str]()
        self.rows: list[tuple[int, str]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag in ("summary", "div") and (dict(attributes).get("class") or "").split()[:1] == ["r"]:
            self.rows.append((self.open.count("details"), ""))
        if tag not in WITHOUT_END:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, _: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.rows and "style" not in self.open and "title" not in self.open:
            self.rows[-1] = (self.rows[-1][0], self.rows[-1][1] + data)


def rows(thing: object) -> list[tuple[int, str]]:
    """Return the depth and the first word of each row."""
    found = Checked(thing._repr_html_()).rows  # type: ignore[attr-defined]
    return [(depth, text.split("  ")[0].split()[0]) for depth, text in found[1:]]


def pictures(thing: object) -> int:
    return str(thing._repr_html_()).count("<svg")  # type: ignore[attr-defined]


def test_rows_are_nested_as_the_modules_are() -> None:
    values = {name: torch.randn(3) for name in ("wte", "h.0.mlp.0", "h.0.mlp", "h.0", "h.0:input", "h.1.mlp", "head")}
    assert rows(hl.Cache(values)) == [
        (0, "wte"),
        (1, "h"),  # Has no value, but holds two blocks.
        (2, "h.0"),
        (2, "h.0:input"),
        (3, "h.0.mlp"),
        (3, "h.0.mlp.0"),
        (1, "h.1.mlp"),  # `h.1` holds nothing else, so it has no row.
        (0, "head"),
    ]


def test_methods_functions_and_subscripts_are_of_their_module() -> None:
    values = {name: torch.randn(3) for name in ("a.b", "a.b/softmax#1", "a.b.encode()", 'a.b:inputs["x.y"]', "a.b[0]")}
    assert [name for _, name in rows(hl.Cache(values))] == list(values)
    assert {depth for depth, _ in rows(hl.Cache(values))} == {1}


def test_all_that_is_shown_is_escaped_and_no_script_is_in_it() -> None:
    class Evil(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    Evil.__name__ = "<img src=x onerror=alert(1)>"
    model = nn.Sequential(Evil())
    model.register_module("</details><script>alert('1')</script>", nn.Sequential(Evil()))
    model[1].register_module("<b>", nn.Sequential(Evil(), Evil()))
    hooks = hl.Hooks(model)
    hooks.edit("0", lambda value: value, name='"><script>')
    for thing in (hl.sites(model), hooks, hl.attached(model), hl.scan(model, torch.ones(2))):
        assert Checked(thing._repr_html_()).tags <= {"div", "style", "details", "summary", "span", "i", "svg", "path"}
    assert "&lt;script&gt;" in hl.sites(model)._repr_html_()
    hooks.remove()
    title = Table(("<b>",), [("x",)], "a & <b>").html()
    assert "<b>" not in title
    assert "a &amp; &lt;b&gt;" in title


def test_a_long_table_opens_as_far_as_it_fits_on_a_screen() -> None:
    model = GPT(depth=30)
    opened = re.findall(r"<details( open)?>", hl.sites(model)._repr_html_())
    assert opened[0] == " open"
    assert opened.count(" open") < len(opened)
    assert set(re.findall(r"<details( open)?>", hl.sites(GPT(depth=2))._repr_html_())) == {" open"}


def test_a_very_long_table_says_what_it_leaves_out() -> None:
    shown = Table(("site",), [(f"h.{number}",) for number in range(MOST_ROWS + 7)]).html()
    assert "… 7 more" in shown
    Checked(shown)


def test_a_name_of_a_thousand_modules_is_shown() -> None:
    Checked(Table(("site",), [(".".join("a" * number),) for number in range(1, 1500, 100)]).html())


def test_every_value_has_a_histogram() -> None:
    model = GPT(depth=2)
    hooks = hl.Hooks(model)
    acts = hooks.capture("h.*")
    hooks.edit("head", lambda value: value)
    assert pictures(hooks) == 0
    model(tokens())
    assert pictures(acts) == pictures(hooks) == pictures(acts.stats()) == 2
    hooks.remove()
    assert "<title>from -1 to 2</title>" in hl.Cache({"x": torch.tensor([-1.0, 0.5, 2.0])})._repr_html_()


@pytest.mark.parametrize(
    ("value", "has_one"),
    [
        (torch.tensor([float("nan"), float("inf")]), False),
        (torch.zeros(0), False),
        (torch.ones(5, device="meta"), False),
        ("text", False),
        ((torch.ones(2), None, {"a": torch.zeros(3)}), True),
        (torch.tensor([1.0, float("nan")]), True),
        (torch.ones(3, dtype=torch.bool), True),
        (torch.ones(3, dtype=torch.complex64), True),
        (torch.ones(3, dtype=torch.bfloat16), True),
        (torch.eye(3).to_sparse(), True),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), False),
        (torch.ones(1).expand(10**9), True),
        (torch.tensor(3.0), True),
        (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), True),
    ],
    ids=lambda one: str(getattr(one, "dtype", one))[:20] if not isinstance(one, bool) else "",
)
def test_any_value_can_be_looked_at(value: object, has_one: bool) -> None:
    assert pictures(hl.Cache({"x": value})) == has_one


def test_what_was_overwritten_or_is_on_disk_has_none_and_nothing_is_raised_or_read(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    with hl.capture(model, "0", "1", clone=False) as stale:
        model(torch.randn(2, 4))
    assert pictures(stale) == 1
    with hl.capture(mlp(), "*", limit=0, spill=True) as spilled:
        hooked = spilled
    assert pictures(hooked) == 0
    net = mlp()
    with hl.capture(net, "*", keep="all", limit=0, spill=tmp_path) as spilled:
        net(torch.randn(3, 4))
    for path in tmp_path.glob("*/*"):
        path.unlink()
    assert pictures(spilled) == 0
    assert len(rows(spilled)) == 3
    with pytest.raises(hl.StoreError):
        spilled["0"]


def test_looking_warns_of_nothing_and_changes_nothing() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(self.inner(x))

    model = Twice()
    with hl.capture(model, "inner") as acts:
        model(torch.randn(2, 4))
    assert pictures(acts) == 1
    with pytest.warns(hl.HooklineWarning, match=says("fired several times in one forward")):
        _ = acts["inner"]


def test_three_hundred_big_values_are_shown_at_once() -> None:
    value = torch.randn(16, 512, 256)
    cache = hl.Cache({f"h.{number}.mlp": value.transpose(0, 1) for number in range(300)})
    began = time.perf_counter()
    assert pictures(cache) == 300
    assert time.perf_counter() - began < 2


def test_a_histogram_is_of_elements_from_all_over_a_value() -> None:
    value = torch.zeros(64, 1024)
    value[:, 512:] = 5.0
    found = glimpse([value])
    assert found is not None
    assert found.counts[0] == pytest.approx(found.counts[-1], rel=0.1)
    assert sum(found.counts) == found.counts[0] + found.counts[-1] <= 4096
    assert hl.Cache({"x": value}).stats()._repr_html_().count("V0h1V16") == 2, "not both bars have the full height"


@pytest.mark.gpu
def test_of_a_value_on_a_device_only_a_few_elements_are_moved() -> None:
    value = torch.randn(64, 1024, 1024, device="cuda").transpose(0, 2)
    cache = hl.Cache({"x": value, "y": value[..., ::2]})
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert pictures(cache) == 2
    assert torch.cuda.max_memory_allocated() - before < 1 << 20
