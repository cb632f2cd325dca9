"""The page's search: its reading of hookline's site language, compared with hookline's."""

from __future__ import annotations

import re
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import hookline as hl
from hookline._kernel import leaves, map_tensors, parse
from hookline.errors import SiteError
from tests.support.explorer_pages import data_of

ROOT = Path(__file__).parents[2]
NAMES = [
    *("abxc", "axbxc", "axb.c", "ab.ab.c"),
    *("", "embed", "head", "h.0", "h.1", "h.10", "h.0.mlp", "h.1.mlp", "h.1.mlp.0", "h.1.attn", "block_1"),
    *("block_2.mlp", "h.0:input", 'h.0:inputs["mask"]', "h.1:grad_output", "h.1:grad_output[0]", "h.0[0]"),
    *("h.0[0][:, -1]", "h.0[:, -1]", "h.0#2", "h.0#2:input[0]", "h.1.attn/softmax", "h.1.attn/softmax#1"),
    *("h.1#2/softmax", "h.1.attn/matmul", "h.1.attn.split_heads()", "encode()", "h.1.attn.split_heads()#3"),
    *("head.weight:param", "h.1.W/matmul", r"a\:input", r"\*", r"\*:input", "h.0[..., ::2]", "h.0[1:2, None]"),
    *(r'h.0["a\"b"]', "größe.0", "h.1.attn[1]"),
    *("h.0#0", "h.0#7", "h.0#1:", "h.0#:3", "h.0#1:9:2", "h.0#{0,2}", "h.0#*", "h.0#-1", "h.1#1:/softmax#2"),
    *("h.0#1:input", "h.0#1::input", "h.0#{0,2}:input[:, @17]", "h.1[:, @17]", "h.1[:, @3:9]", "h.1[:, @-1]"),
    *("h.1[:, @prompt]", "h.1[:, @prompt[-1]]", "h.1[:, @prompt[2:5]]", "h.1[:, @new]", "h.1[:, @new[:8]]"),
    *("h.1[:, @(3, 5)]", "h.1[:, @((3, 4), (5, 6))]", "h.1[:, @mask(0:3,5|2:4)]", "h.1[0][:, @::2, 3]"),
]  # fmt: skip
WRITTEN = [
    *("a*b*c", "a*bx*", "*b*", "a*", "a*c", "*x*x*", "**.ab.**", "a**", "ab.**.c", "**.ab.c", "**.**", "*.**.c"),
    *("h.*", "h.**", "**", "**.mlp", "*", "h.{0,1}", "h.{ 0 , 10 }.mlp", "block_*", "*_*", "h.1*", "h.*.*", "h.**.0"),
    *("**.head", "h.*:input", "h.*:inputs", "h.*:inputs['mask']", "**:grad_output", "h.1:grad_output[0][1]"),
    *("h.*[*]", "h.0[0][:,-1]", "h.0[*][:, *]", "h.0[:, *]", "h.0[0][*, -1]", "h.*#2", "h.0:input[0]#2", "h.0#007"),
    *("h.0#٢", "**/softmax", "**/*", "h.1.attn/{softmax,matmul}", "h.1.attn/soft*", "h.1#2/*", "**.attn/*#1"),
    *("**.split_heads()", "**.*()", "*()", "**()", "h.1.attn.split*()", "**:param", "head.*:param", "h.1.W/*"),
    *("a:input", r"a\:input", r"\*", r"\**", "h.0[ ... , : : 2 ]", "h.0[1:2,None]", "h.0['a\"b']", "h.0[-0]", "gr*"),
    *("größe.*", "", " ", "h.", ".h", "h..0", "h.0[", "h.0]", "h.0[a]", "h.{", "h.{}", "h.{a.b}", "h.***", "h.**x"),
    *("h.0#", "h.0#x", "h.0:outptu", "h.0:", "h.0/", "h.0/a.b", "h.0.f(", "f()x", "h.0[0 1]", "h.0[]", "h.0[::0]"),
    *("h.0[...,...]", 'h.0["a",0]', "h.0[2147483648]", "h.0[-2147483647]", "x:param#1", "x/f:param", "h.0#1#2", "\\"),
    *("h" * 4097, "h.{0,1}{0,1}", "h.{1,}*", "{" + ",".join(map(str, range(1025))) + "}"),
    *("{" + ",".join(map(str, range(300))) + "}",),
    *("h.0#", "h.*#1:", "h.*#:3", "h.*#0:3:1", "h.*#1:9", "h.*#1:9:2", "h.*#3:1", "h.*#1:9:0", "h.*#{2, 0,2}"),
    *("h.*#*", "h.*#-1", "h.*#-2", "h.*#1-", "h.*#1,2", "h.*#{0", "h.*#{a}", "h.*#-1:", "h.*#{0,2}:input", "h.*#{7}"),
    *("h.*#1:input", "h.*#1::input", "h.*#٢:٣", "h.*:input#1:", "h.*#12345678901", "x:param#1:", "**/softmax#1:"),
    *("h.*#*/softmax#2", "h.1[:, @17]", "h.1[ : ,@ 17 ]", "h.1[:, @017]", "h.1[:, @-0]", "h.1[:, @-1]"),
    *("h.1[:, @-2]", "h.*[*, @3:9]", "h.1[:, @3:9:1]", "h.1[:, @9:3]", "h.1[:, @3:9:-1]", "h.1[:, @0::2]"),
    *("h.1[:, @]", "h.1[:, @:]", "h.1[@17]", "h.1[:, @prompt]", "h.1[:, @prompt[:]]", "h.1[:, @ prompt []]"),
    *("h.1[:, @prompt[-1]]", "h.1[:, @prompt[2 : 5]]", "h.1[:, @prompt[x]]", "h.1[:, @promp]", "h.1[:, @new]"),
    *("h.1[:, @new[0:8]]", "h.1[:, @new[-1]]", "h.1[:, @new[-2]]", "h.1[:, @(3,5)]", "h.1[:, @( 3, 5, )]"),
    *("h.1[:, @(3 5)]", "h.1[:, @()]", "h.1[:, @((3,4),(5,6))]", "h.1[:, @((3),5)]", "h.1[:, @((3,4),(5))]"),
    *("h.1[:, @mask(0:3,5|2:4)]", "h.1[:, @mask(5,2,1,0|2,3)]", "h.1[:, @mask(3:|2)]", "h.1[:, @mask(|)]"),
    *("h.1[:, @17 3]", "h.1[:, @17, @18]", "h.1[:, 1:@3]", "h.1[0][*, @0::2, 3]", "h.0#{0,2}:input[:, @17]"),
    *("h.1[:, @٣:9]", "h.1[:, @prompt[0:0]]", "h.1[:, @prompt[-3:0]]", "h.1[:, @12345678901]", "h.1[:, @(3, 5): ]"),
]  # fmt: skip


def patterns_of(*files: str) -> list[str]:
    """Return every quoted text in these files. Most are patterns; page and hookline must read all of them alike."""
    quoted = re.compile(r"\"([^\"\n]+)\"|`([^`\n]+)`|'([^'\n]+)'")
    return sorted(
        {"".join(match.groups("")) for file in files for match in quoted.finditer((ROOT / file).read_text("utf-8"))}
    )


def meant(text: str, names: list[str] = NAMES) -> list[str] | None:
    """Return the sites that hookline selects, as Cache.select does, or None if the pattern is invalid."""
    try:
        pattern = parse(text)
        return [name for name in names if pattern.beyond(hl.Site.parse(name)) is not None]
    except SiteError:
        return None


@pytest.fixture(scope="module")
def places(pages) -> Path:
    from tests.browser.conftest import once

    values = {name: torch.zeros(2, 3) for name in NAMES}
    return once(lambda to: hl.explore(values, to=to, title="Places"), pages / "places.html")


def test_the_page_knows_the_sites_by_their_own_names(look, places):
    window = look(places)
    assert [name for name in NAMES if window.matches(name) is None or name not in window.matches(name)] == []


def test_patterns_that_people_write_mean_the_same_in_python_and_on_the_page(look, places):
    texts = [
        *WRITTEN,
        *NAMES,
        *patterns_of("tests/sites/test_language.py", "tests/sites/test_resolve.py", "docs/sites.md", "docs/inside.md"),
    ]
    assert len(texts) > 300
    found = look(places).page.evaluate("texts => texts.map(text => window.hookline.matches(text))", texts)
    assert {text: had for text, had in zip(texts, found, strict=True) if sorted_of(had) != sorted_of(meant(text))} == {}
    assert sum(bool(had) for had in found) > 100


PIECES = [
    *("a", "b", "x", "c", "ab"),
    *("h", "0", "1", "10", "mlp", "attn", "softmax", "W", "größe", "a:input", *".*#:/[]{}(),\\\"'- \t\n", "**", "()"),
    *("[0]", "[:, -1]", "[*]", ":input", ":grad_output", ":param", "#2", "/softmax", "{0,1}", "...", "None", "²"),
    *("٣", "😀", "#1:", "#:3", "#{0,2}", "#*", "#-1", "@", "@17", "@3:9", "@prompt", "@new", "[:, @", "]", "@("),
    *("@mask(", "[:, @17]", "[:, @prompt[-1]]", "3, 5", "|", "17"),
]  # fmt: skip


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.lists(st.sampled_from(PIECES), max_size=9).map("".join) | st.text(max_size=8), min_size=25, max_size=60)
)
def test_any_text_means_the_same_in_python_and_on_the_page(searcher, texts):
    found = searcher.page.evaluate("texts => texts.map(text => window.hookline.matches(text))", texts)
    assert {text: had for text, had in zip(texts, found, strict=True) if sorted_of(had) != sorted_of(meant(text))} == {}


@pytest.fixture
def searcher(look, places):
    return look(places)


def sorted_of(names: list[str] | None) -> list[str] | None:
    return None if names is None else sorted(names)


def test_the_page_says_how_a_search_was_understood(look, gpt2):
    window = look(gpt2)
    assert window.search("transformer.h.*.mlp") == "pattern: 12 sites"
    assert [name for name in window.rows if name == "mlp"] == ["mlp"] * 12
    assert "ln_1" not in window.rows
    assert window.search("softmax").startswith("matches nothing as a pattern; names with this text: 24 sites")
    assert window.search("h.{0").startswith("is no pattern (“{” is not closed at 3)")
    assert window.search("nothing like this").endswith("names with this text: 0 sites")
    assert window.page.text_content(".tree .empty") == "Nothing is found."
    assert window.search("") == "359 sites in 164 modules" or window.search("").endswith("in 164 modules")


def test_a_pattern_that_begins_too_late_is_offered_with_its_beginning(look, gpt2):
    window = look(gpt2)
    assert window.search("h.*.mlp").endswith("**.h.*.mlp means 12 sites")
    window.page.click(".search-status button")
    assert window.page.input_value("#search") == "**.h.*.mlp"
    assert window.page.text_content(".search-status") == "pattern: 12 sites"


def test_charts_are_of_the_sites_that_match(look, gpt2):
    window = look(gpt2, search="transformer.h.{0,1,2}.mlp")
    assert window.page.locator(".families h3").text_content() == "3 sites that match"
    assert window.page.locator(".line-chart circle.run-a").count() == 3
    window.page.locator(".chip", has_text=re.compile(r"^transformer\.h\.\*$")).click()
    assert window.page.input_value("#search") == "transformer.h.*"
    assert window.page.locator(".line-chart circle.run-a").count() == 12


def test_enter_goes_to_the_one_site_that_is_found(look, gpt2):
    window = look(gpt2)
    window.search("transformer.wte")
    window.press("Enter")
    assert window.heading == "transformer.wte"


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Parts(nn.Module):
    """Returns nested tuples, named tuples, dicts and a None."""

    def forward(self, x):
        a, b, c = (x.clone() for _ in range(3))
        return {"pair": Pair(a, b), "rest": (None, [c])}


class Tree(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(Parts() for _ in range(3))
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x):
        for block in self.h:
            x = block(x)["pair"].left
        return self.lstm(x)


SPLIT = [
    *("h.*", "h.1", "**", "*", "lstm", "lstm[0]", "lstm[1]", "lstm[-1]", "lstm[*]", "lstm[1][0]", "lstm[1][-1]"),
    *("lstm[1][*]", "lstm[*][0]", "lstm[-2]", "lstm[2]", "lstm[1][2]", "lstm[0][:, -1]", "lstm[1][0][0]", "lstm[:1]"),
    *("lstm[1:]", "lstm[::-1]", "lstm[1][1:]", "lstm[5:]", "lstm[-1:]", "lstm[:, 0]", "lstm[1][-2:-1]"),
    *('h.*["pair"]', 'h.*["pair"][0]', 'h.*["pair"]["right"]', 'h.*["pair"][-1]', 'h.0["pair"][*]', 'h.{0,2}["rest"]'),
    *('h.0["rest"][1]', 'h.0["rest"][1][0]', 'h.0["rest"][-1][-1]', 'h.0["other"]', "h.0[*]", "h.0[0]", "h.0[0][0]"),
    *("h.1:inputs", "h.*:inputs[0]", "h.1:inputs[*]", "h.1:inputs[-1]", "h.2:input", "lstm:grad_output", "h.1#0"),
    *("h.2[\"rest\"]", 'h.2["rest"][1]', 'h.2["rest"][*]'),
]  # fmt: skip


def test_a_site_whose_value_has_several_tensors_is_found_as_in_the_cache(look, tmp_path):
    model, numbers = Tree(), count(1)
    with hl.capture(model, "h.{0,1}", "lstm", "h.*:inputs", 'h.2["rest"]', "lstm:grad_output") as acts:
        model(torch.randn(2, 3, 4, requires_grad=True))[0].sum().backward()
    acts = acts.map(lambda value: map_tensors(lambda tensor: torch.full_like(tensor, next(numbers)), value))
    page = hl.explore(acts, to=tmp_path / "split.html")
    names = {site["stats"][0]["max"]: site["name"] for site in data_of(page)["sites"]}
    window = look(page)

    def selected(text: str) -> list[str]:
        try:
            chosen = acts.select(text)
        except hl.HooklineError:
            return []
        return [names[float(tensor.max())] for value in chosen.values() for tensor in leaves(value)]

    found = {text: sorted(window.matches(text)) for text in SPLIT}
    assert found == {text: sorted(selected(text)) for text in SPLIT}
    assert sum(map(bool, found.values())) > 35
    assert window.search("lstm") == "pattern: 3 sites"


def test_attention_is_found_by_the_pattern_of_its_modules(look, gpt2):
    window = look(gpt2)
    assert window.search("transformer.h.*.attn") == "pattern: 24 sites"
    assert {name.partition("[")[0] for name in window.matches("transformer.h.*.attn:grad_output")} == {
        f"transformer.h.{layer}.attn:grad_output" for layer in range(12)
    }


def test_of_one_site_that_matches_the_page_speaks_as_of_one(look, gpt2):
    window = look(gpt2, search="transformer.h.0.mlp")
    assert window.page.locator(".families h3").text_content() == "1 site that matches"
