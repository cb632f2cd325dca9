"""Site: one place has one canonical text, and any spelling of it is accepted."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hookline as hl
from hookline._kernel import parse, write_subscripts
from tests.errors.wording import says


@pytest.mark.parametrize(
    ("text", "site"),
    [
        ("h.3.mlp", hl.Site("h.3.mlp")),
        ("", hl.Site("")),
        (":input", hl.Site("", "input")),
        ("[0]", hl.Site("", index="[0]")),
        ("h.3:output", hl.Site("h.3")),
        ("h.3:input", hl.Site("h.3", "input")),
        ("h.3:inputs['mask']", hl.Site("h.3", "inputs", '["mask"]')),
        ("h.3:grad_output", hl.Site("h.3", "grad_output")),
        ("h.3:grad_input", hl.Site("h.3", "grad_input")),
        ("h.3:grad_inputs[0]", hl.Site("h.3", "grad_inputs", "[0]")),
        ("h.3[0][:,-1]", hl.Site("h.3", index="[0][:, -1]")),
        ("h.3[ 1 : 2 , ... , None ]", hl.Site("h.3", index="[1:2, ..., None]")),
        ("h.3[*]", hl.Site("h.3", index="[*]")),
        ("h.3#2", hl.Site("h.3", call=2)),
        ("h.3#2:input[0]", hl.Site("h.3", "input", "[0]", 2)),
        ("h.3:input[0]#2", hl.Site("h.3", "input", "[0]", 2)),
        ("h.3#007", hl.Site("h.3", call=7)),
        (r"a\:input", hl.Site("a:input")),
        (r"\*", hl.Site("*")),
    ],
)
def test_text_is_read_as_the_site_it_names(text: str, site: hl.Site) -> None:
    assert hl.Site.parse(text) == site


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("h.3:output", "h.3"),
        ("h.3:inputs['mask'][:,-1]", 'h.3:inputs["mask"][:, -1]'),
        ("h.3:input[ 0 ]#2", "h.3#2:input[0]"),
        ("h.3[0:]", "h.3[0:]"),
        ("h.3[: :2]", "h.3[::2]"),
        ("h.3[1:2:]", "h.3[1:2]"),
        ("h.3['it\\'s']", 'h.3["it\'s"]'),
        ("h.3['a\"b']", r'h.3["a\"b"]'),
        ("h.3[-0]", "h.3[0]"),
        (r"a\b", "ab"),
    ],
)
def test_each_site_has_one_canonical_text(text: str, canonical: str) -> None:
    assert str(hl.Site.parse(text)) == canonical
    assert str(hl.Site.parse(canonical)) == canonical


def test_a_site_shows_its_text_and_its_parts() -> None:
    site = hl.Site.parse('h.3#2:inputs["mask"][:, -1]')
    assert (site.path, site.port, site.index, site.call, site.member) == ("h.3", "inputs", '["mask"][:, -1]', 2, "")
    assert repr(site) == "Site('h.3#2:inputs[\"mask\"][:, -1]')"
    assert site.subscripts == ("mask", (slice(None), -1))
    assert not site.is_gradient
    assert hl.Site("h", "grad_input").is_gradient


def test_sites_are_frozen_hashable_and_survive_pickling() -> None:
    site = hl.Site.parse("h.3:input[0]")
    with pytest.raises(AttributeError):
        site.path = "h.4"  # type: ignore[misc]
    assert {site: 1}[hl.Site("h.3", "input", "[0]")] == 1
    assert pickle.loads(pickle.dumps(site)) == site


@pytest.mark.parametrize("text", ["h.*", "**", "h.{0,1}", "block_*:input"])
def test_a_pattern_is_no_single_site(text: str) -> None:
    with pytest.raises(hl.SiteError, match=says("wildcard and names no single")):
        hl.Site.parse(text)


def test_only_text_can_be_parsed() -> None:
    with pytest.raises(hl.SiteError, match=says("a site is text")):
        hl.Site.parse(3)  # type: ignore[arg-type]


(STAR,) = hl.Site.parse("h[*]").subscripts
integers = st.integers(-(2**31) + 1, 2**31 - 1)
bounds = st.none() | integers
slices = st.builds(slice, bounds, bounds, st.none() | integers.filter(bool))
items = integers | slices | st.none() | st.just(STAR)
tuples = st.lists(items, min_size=2, max_size=4).map(tuple)
with_ellipsis = st.tuples(st.just(Ellipsis), items)
subscripts = st.lists(items | st.just(Ellipsis) | tuples | with_ellipsis | st.text(), max_size=4).map(tuple)
paths = st.lists(st.text(min_size=1).filter(lambda name: "." not in name), max_size=4).map(".".join)
ports = st.sampled_from(["output", "input", "inputs", "grad_output", "grad_input", "grad_inputs"])


@given(paths, ports, subscripts, st.none() | st.integers(0, 10**9))
def test_any_site_is_read_back_from_its_text(path: str, port: str, parts: tuple[object, ...], call: int | None) -> None:
    site = hl.Site(path, port, write_subscripts(parts), call)
    assert hl.Site.parse(str(site)) == site
    assert hl.Site.parse(str(site)).subscripts == parts


@given(st.text())
def test_any_key_is_read_as_itself(key: str) -> None:
    quoted = key.replace("\\", "\\\\").replace("'", "\\'")
    assert hl.Site.parse(f"h['{quoted}']").subscripts == (key,)


def test_a_long_list_of_short_alternatives_is_read() -> None:
    text = "{" + ",".join(map(str, range(0, 400, 2))) + "}"
    assert parse(text).matches("398")
    with pytest.raises(hl.SiteError, match=says("more than alternatives", 1024)):
        parse("{" + ",".join(map(str, range(1025))) + "}")


@pytest.mark.parametrize("text", ["h#{5\x1c,12}", "h#{ 12 , 5 }", "h[:, @(5\x1c, 12)]", "h[:, @mask(5\x1c:12)]"])
def test_any_space_may_stand_around_the_numbers_of_calls_and_tokens(text: str) -> None:
    plain = text.replace("\x1c", " ")
    assert hl.Site.parse(text) == hl.Site.parse(plain) == hl.Site.parse(str(hl.Site.parse(plain)))
