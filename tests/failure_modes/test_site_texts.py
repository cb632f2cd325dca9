"""Site texts that are malformed, hostile or just unusual: parsed correctly or refused, and never evaluated."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from hookline._kernel import parse
from tests.errors.wording import says
from tests.support.models import GPT, mlp

MALFORMED = {
    "h.3[": "not a subscript",
    "h.3[]": "empty subscript",
    "h.3[0": "not a subscript",
    "h.3[0]]": "unexpected ']'",
    "h.3[0,]": "empty subscript",
    "h.3[,0]": "empty subscript",
    "h.3[0 1]": says("a comma is missing"),
    "h.3[a]": "not a subscript",
    "h.3[:, [0, 2]]": says("not a subscript", "[:, 0]", "[:, 2]"),
    "h.3[0.5]": "not a subscript",
    "h.3[--1]": "not a subscript",
    "h.3[1:2:3:4]": "not a slice",
    "h.3[::0]": "not a slice",
    "h.3[None:2]": "not a slice",
    "h.3[*:2]": "not a slice",
    "h.3[..., ...]": says("more than one", "..."),
    'h.3["a", 0]': says("a key stands alone"),
    'h.3["a]': "not a subscript",
    "h.3[0]x": "unexpected 'x'",
    "h[1][2].0": says("named with dots", "h.1.2.0"),
    "h['a'].0": says("named with dots", "h.a.0"),
    "h[*].0": says("named with dots", "h.*.0"),
    "h[-1].0": says("named with dots by"),
    "h[2:4].0": says("named with dots by"),
    "h.3:": says("is not a port"),
    "h.3:inptu": says("is not a port did", "inptu", "input"),
    "h.3:grad": says("is not a port did", "'grad'", "'grad_output' or 'grad_input'"),
    "h.3:gradient": says("is not a port did", "'gradient'", "'grad_output' or 'grad_input'"),
    "h.3.weight:grad": says("The gradient of a parameter"),
    "h.3:input:output": "unexpected ':'",
    "h.3#": says("takes the number of", "#"),
    "h.3#x": says("takes the number of", "#"),
    "h.3#-2": says("takes the number of", "#"),
    "h.3#1#2": "unexpected '#'",
    "h.{0,1": says("is not closed", "{"),
    "h.{}": says("plain names between commas"),
    "h.{0,}": says("plain names between commas"),
    "h.{0,{1,2}}": says("plain names between commas"),
    "h.***": r"'\*\*' stands alone",
    "h.a**": r"'\*\*' stands alone",
    "h.3.attn.split_heads(": r"written with '\(\)'",
    "h.3.attn.split_heads(x)": r"written with '\(\)'",
    "h.3.attn.()": says("has a plain name"),
    "h.3/": says("has a plain name"),
    "h.3/**": says("has a plain name"),
    "h.3/soft max": says("has a plain name"),
    "h.3/softmax/relu": "unexpected '/'",
    "h.3.weight:param#1": says("it has no calls"),
    "h.3/softmax:param": "no members",
}


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_text_is_refused_with_the_reason(text: str) -> None:
    """H01"""
    with pytest.raises(hl.SiteError, match=MALFORMED[text]) as said:
        hl.capture(mlp(), text)
    assert text in str(said.value)


@pytest.mark.parametrize(
    ("text", "column"), [("h.3[0]]", 6), ("h.3:inptu", 3), ("h.3#x", 3), ("h.{0", 2), ("h.3[1, a]", 7), ("h.3[0]x", 6)]
)
def test_the_place_of_the_error_is_pointed_at(text: str, column: int) -> None:
    """H01"""
    with pytest.raises(hl.SiteError) as said:
        hl.Site.parse(text)
    *_, shown, caret = str(said.value).splitlines()
    assert shown.strip() == text
    assert shown.index(text) + column == caret.rstrip().index("^")


@pytest.mark.parametrize(
    "index",
    ["[-1]", "[::2]", "[-3:-1]", "[...]", "[..., 0]", "[None]", "[:, None, -1]", "[1:8:3]", "[0][1]", "[1:][0, ::2]"],
)
def test_a_subscript_means_what_it_means_in_python(index: str) -> None:
    """H01"""
    tensor = torch.arange(24).reshape(4, 6)
    _, acts = hl.run(nn.Identity(), tensor, capture=index)
    assert torch.equal(acts[index], eval(f"tensor{index}", {"tensor": tensor}))


def test_a_subscript_that_torch_does_not_have_is_refused_by_name() -> None:
    """H01"""
    with pytest.raises(hl.SiteError, match=r"'\[::-1\]'.*step"):
        hl.run(nn.Identity(), torch.arange(4), capture="[::-1]")


HOSTILE = [
    "h[__import__('os').system('true')]",
    "h[(lambda: 0)()]",
    "h[exec('x')]",
    "h[0 if True else 1]",
    "h[9**9**9]",
    "h[[0] * 10**9]",
    "h[`id`]",
    "h[{0}]",
    "h[f'{1}']",
    "h[\x00]",
    "h[0x10]",
    "h[1_000]",
    "h[1e3]",
    "h[²]",
    "h[True]",
    "h[0:=1]",
    "h[open]",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_code_in_a_subscript_is_refused_and_not_run(text: str) -> None:
    """H02"""
    with pytest.raises(hl.SiteError):
        hl.Site.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "h" * 100_000,
        "h[" + "1" * 5_000 + "]",
        "h[" + str(2**31) + "]",
        "h[-" + str(2**31) + "]",
        "h#" + "9" * 20,
        "{a,b}" * 20,
        "{" + "a," * 2_000 + "a}",
    ],
)
def test_texts_and_numbers_have_limits(text: str) -> None:
    """H02"""
    with pytest.raises(hl.SiteError):
        hl.Site.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "{a,b}" * 10 + "x" * 4_000,
        "[" * 4_000,
        "h" + "[0]" * 1_300,
        "h[" + "0," * 2_000 + "0]",
        "*a" * 2_000,
        "**." * 1_300 + "x",
        "\\" * 4_000,
        "h['" + "\\" * 4_000,
        'h["' + "a" * 4_000,
        "h[" + " " * 4_000,
        "." * 4_000,
    ],
)
def test_no_text_takes_long_to_read(text: str) -> None:
    """H02"""
    begin = time.process_time()
    with suppress(hl.SiteError):
        parse(text)
    assert time.process_time() - begin < 0.5


PIECES = [
    "h", "0", ".", "..", "*", "**", "[", "]", "[0]", "[-1]", "[:, -1]", "[...]", "[None]", '["a"]', "['b']", "[*]", "{",
    "}", "{a,b}", ",", ":", ":input", ":grad_output", "#", "#1", "/", "()", "\\", "'", '"', " ", "\n", "\x00", "é",
    "🙂", "-", "99999999999", "__class__",
]  # fmt: skip


def random_texts(number: int) -> list[str]:
    choose = random.Random(0)
    texts = ["".join(choose.choices(PIECES, k=choose.randrange(1, 9))) for _ in range(number // 2)]
    return texts + [
        "".join(chr(choose.randrange(1, 300)) for _ in range(choose.randrange(12))) for _ in range(number // 2)
    ]


def test_random_texts_are_read_or_refused() -> None:
    """H02"""
    read = 0
    for text in random_texts(20_000):
        try:
            parse(text)
        except hl.SiteError:
            continue
        read += 1
        with suppress(hl.SiteError):  # It is a pattern of sites.
            site = hl.Site.parse(text)
            assert hl.Site.parse(str(site)) == site, text
    assert read > 2_000


def test_random_patterns_match_what_their_meaning_says() -> None:
    """H03"""
    choose = random.Random(0)
    for _ in range(3_000):
        pattern = "".join(choose.choices("ab*", k=choose.randrange(1, 7)))
        name = "".join(choose.choices("ab", k=choose.randrange(1, 7)))
        if "**" in pattern:
            continue
        assert parse(pattern).matches(name) == _means(pattern, name) or "*" not in pattern


def _means(pattern: str, name: str) -> bool:
    """Return True if a pattern matches one name, by trying every way: `*` is one character or more."""
    if not pattern or not name:
        return not pattern and not name
    if pattern[0] == "*":
        return _means(pattern[1:], name[1:]) or _means(pattern, name[1:])
    return pattern[0] == name[0] and _means(pattern[1:], name[1:])


def test_random_patterns_over_several_names_match_what_their_meaning_says() -> None:
    """H03"""
    choose = random.Random(1)
    for _ in range(3_000):
        pattern = choose.choices(["a", "b", "*", "**"], k=choose.randrange(1, 6))
        names = choose.choices(["a", "b", "ab"], k=choose.randrange(1, 6))
        if not any("*" in part for part in pattern):
            continue
        expected = _means_names(pattern, names)
        assert parse(".".join(pattern)).matches(".".join(names)) == expected, (pattern, names)


def _means_names(pattern: list[str], names: list[str]) -> bool:
    """Return True if a pattern matches a list of names: `**` is any number of names, at the end at least one."""
    if not pattern:
        return not names
    if pattern[0] == "**":
        if len(pattern) == 1:
            return bool(names)
        return _means_names(pattern[1:], names) or (bool(names) and _means_names(pattern, names[1:]))
    return bool(names) and pattern[0] in ("*", names[0]) and _means_names(pattern[1:], names[1:])


def test_patterns_that_would_make_a_regular_expression_explode_take_no_time() -> None:
    """H03"""
    model = nn.Module()
    model.add_module("a" * 3_000, nn.ReLU())
    deep = model
    for _ in range(100):
        deep.add_module("a", nn.Sequential())
        deep = deep._modules["a"]  # type: ignore[assignment]
    begin = time.process_time()
    for pattern in ("a*" * 1_500 + "b", ".".join(["**", "a"] * 100) + ".**.b", "*a" * 1_000 + "b", "{a,b}*" * 9 + "c"):
        with pytest.raises(hl.SiteError, match="matches nothing"):
            hl.sites(model, pattern)
    assert time.process_time() - begin < 2


class Trapped(nn.Module):
    """Has attributes that must not be touched while a name is looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.layers = nn.ModuleList([nn.ReLU()])

    @property
    def shortcut(self) -> nn.Module:
        raise AssertionError("a property ran")

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize(
    "path",
    [
        "shortcut", "layer.forward", "__class__", "layer.__class__", "layer.__dict__", "layers.-1",
        "layers.00", "_modules", "layer._parameters", "training", "forward", "layers.__len__",
    ],
)  # fmt: skip
def test_names_are_those_of_modules_and_nothing_else_is_reached(path: str) -> None:
    """H04"""
    with pytest.raises(hl.SiteError, match=says("matches nothing", "Trapped")):
        hl.capture(Trapped(), path)


def test_a_key_never_runs_a_property_or_a_method_of_the_value() -> None:
    """H04"""

    class Output:
        def __init__(self, x: Tensor) -> None:
            self.value = x

        @property
        def danger(self) -> Any:
            raise AssertionError("a property ran")

        def method(self) -> None: ...

    class Returning(nn.Module):
        def forward(self, x: Tensor) -> Output:
            return Output(x)

    _, acts = hl.run(Returning(), torch.ones(2), capture='["value"]')
    assert acts['["value"]'].tolist() == [1.0, 1.0]
    for key in ("danger", "method", "__class__", "__dict__"):
        with pytest.raises(hl.SiteError, match=says("is not a part of Output", f"'{key}'")):
            hl.run(Returning(), torch.ones(2), capture=f'["{key}"]')


def test_looking_a_name_up_takes_no_time_in_a_large_model() -> None:
    """H04"""
    model = GPT(depth=300)
    begin = time.process_time()
    with pytest.raises(hl.SiteError, match=says("matches nothing did you mean", "GPT", "'h.…mlp…")):
        hl.capture(model, "h.299.mpl")
    assert time.process_time() - begin < 1
