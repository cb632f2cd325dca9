"""A cache is a mapping from site to value: read by any spelling, narrowed, mapped, stacked, compared and described."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import GPT, Nested, mlp, tokens


class Repeats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(self.cell(self.cell(x)))


def captured(*where: Any, **options: Any) -> tuple[GPT, hl.Cache]:
    model = GPT()
    with hl.capture(model, *where, **options) as acts:
        model(tokens())
    return model, acts


def test_a_cache_is_a_mapping_in_the_order_in_which_sites_first_fired() -> None:
    _, acts = captured("head", "h.1", "h.0.mlp:input", "h.0")
    assert isinstance(acts, Mapping)
    assert list(acts) == ["h.0.mlp:input", "h.0", "h.1", "head"]
    assert len(acts) == 4
    assert [site for site, _ in acts.items()] == list(acts)
    assert acts.get("h.7", "nothing") == "nothing"
    assert dict(acts).keys() == acts.keys()


def test_a_site_is_read_by_any_spelling_by_a_site_and_by_its_module() -> None:
    model, acts = captured("h.0", 'h.1:inputs["x"][:, -1]')
    assert acts["h.0:output"] is acts["h.0"]
    assert acts[hl.Site.parse("h.0")] is acts["h.0"]
    assert acts[model.h[0]] is acts["h.0"]
    assert acts.calls(model.h[0]) == [acts["h.0"]]
    for spelling in ("h.1:inputs['x'][:,-1]", 'h.1:inputs["x"][ : , -1 ]'):
        assert acts[spelling] is acts['h.1:inputs["x"][:, -1]']
        assert spelling in acts
    assert model.h[0] in acts
    assert model.h[1] not in acts
    assert "h.2" not in acts
    assert 3 not in acts


def test_caches_are_equal_if_they_hold_the_same_values_of_every_call() -> None:
    nan = torch.tensor([1.0, float("nan")])
    one = {"h.0": (nan, [1, {"a": float("nan")}, None]), "h.1": torch.ones(2, 3)}
    assert hl.Cache(one) == hl.Cache(dict(reversed(one.items())))
    assert hl.Cache({"h.0": (nan.clone(), [1, {"a": float("nan")}, None]), "h.1": torch.ones(2, 3)}) == hl.Cache(one)
    others: list[dict[str, Any]] = [
        {"h.0": one["h.0"]},
        {**one, "h.1": torch.zeros(2, 3)},
        {**one, "h.1": torch.ones(3, 2)},
        {**one, "h.1": torch.ones(2, 3, dtype=torch.float64)},
        {**one, "h.0": (nan, [1, {"a": 2.0}, None])},
        {**one, "h.0": [nan, [1, {"a": float("nan")}, None]]},
        {**one, "h.0": nan},
    ]
    for other in others:
        assert hl.Cache(one) != hl.Cache(other)
    assert hl.Cache(one) != one
    model, x = Repeats(), torch.ones(1, 2)
    with hl.capture(model, "cell", keep="all") as all_calls:
        model(x)
    assert all_calls == all_calls.map(torch.clone)
    assert all_calls != all_calls.map(lambda value: value + 1)
    assert all_calls != hl.Cache({"cell": all_calls["cell"]})


def test_values_of_any_kind_can_be_compared_or_one_line_says_why_not(tmp_path: Path) -> None:
    values = {
        "sparse": torch.eye(2).to_sparse(),
        "small": torch.ones(3).to(torch.float8_e4m3fn),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "whole": torch.ones(2, dtype=torch.uint16),
        "meta": torch.ones(2, device="meta"),
    }
    assert hl.Cache(values) == hl.Cache(values)
    for name, value in values.items():
        if name != "meta":
            assert hl.Cache({name: value}) == hl.Cache({name: value.clone()})
    with pytest.raises(hl.HooklineError, match=says("these caches can't be compared")):
        _ = hl.Cache({"meta": values["meta"]}) == hl.Cache({"meta": values["meta"].clone()})
    acts = hl.Cache({"h.0": torch.randn(2, 3)})
    acts.save(tmp_path / "acts.safetensors")
    assert hl.Cache.load(tmp_path / "acts.safetensors") == acts


def test_a_tied_module_is_read_by_each_of_its_names() -> None:
    model = nn.Sequential(shared := nn.Linear(4, 4), nn.ReLU(), shared)
    with hl.capture(model, "2", keep="all") as acts:
        model(torch.randn(2, 4))
    assert list(acts) == ["2"]
    assert acts["0"] is acts["2"]
    assert acts[shared] is acts["2"]
    assert len(acts.calls("0")) == 2


def test_names_that_look_like_the_language_are_read_as_they_are() -> None:
    model = nn.Sequential()
    for name in ("a:input", "b[0]", "c#1", "*"):
        model.add_module(name, nn.Identity())
    with hl.capture(model, nn.Identity) as acts:
        model(torch.ones(1))
    for name in ("a:input", "b[0]", "c#1", "*"):
        assert acts[name].item() == 1.0
    assert list(acts) == [r"a\:input", r"b\[0\]", r"c\#1", r"\*"]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("h.0.mpl", says("was not captured did", "h.0.mpl", "h.0.mlp")),
        ("head", says("was not captured", "head")),
        (nn.ReLU(), says("ReLU was not captured")),
        (3, "not by int"),
    ],
)
def test_reading_what_was_not_asked_for_says_what_is_near(key: Any, message: str) -> None:
    _, acts = captured("h.0.mlp")
    with pytest.raises(hl.NotCaptured, match=message):
        acts[key]
    with pytest.raises(hl.NotCaptured, match=message):
        acts.calls(key)


def test_reading_too_early_says_what_to_do() -> None:
    model = mlp()
    with hl.capture(model, "0", "0:grad_output", "1[*]") as acts:
        with pytest.raises(hl.NotCaptured, match=says("nothing has passed yet", "0")):
            acts["0"]
        with pytest.raises(hl.NotCaptured, match=r"1\[\*\]"):
            acts["1[0]"]
        assert len(acts) == 0
        output = model(torch.ones(1, 4))
        with pytest.raises(hl.NotCaptured, match=says("no gradient has reached", "0:grad_output")):
            acts["0:grad_output"]
        output.sum().backward()
        assert acts["0:grad_output"].shape == (1, 8)


def test_reading_after_a_block_in_which_the_model_did_not_run_says_so() -> None:
    with hl.capture(mlp(), "0") as acts:
        pass
    with pytest.raises(hl.NotCaptured, match=says("its block is over", "0")):
        acts["0"]


def test_a_star_gives_a_site_for_each_index_that_is_read_like_any_other() -> None:
    _, acts = captured("h.0[*]", "head[..., *]")
    assert list(acts)[:2] == ["h.0[0]", "h.0[1]"]
    assert acts["h.0[1]"].shape == (5, 8)
    assert acts["head[..., 3]"].shape == (2, 5)
    with pytest.raises(hl.NotCaptured, match=says("was not captured did you", "h.0[2]")):
        acts["h.0[2]"]
    assert acts.select("h.0[1][0]")["h.0[1][0]"].equal(acts["h.0[1]"][0])


def test_every_call_is_listed_oldest_first_and_the_latest_is_read() -> None:
    model = Repeats()
    with hl.capture(model, "cell", keep="all") as acts:
        model(torch.ones(2))
    assert len(acts.calls("cell")) == 3
    assert acts["cell"] is acts.calls("cell")[-1]
    assert model.cell(acts.calls("cell")[0]).equal(acts.calls("cell")[1])
    assert "3" in repr(acts)


def test_with_the_last_call_alone_a_repeated_module_warns_once_when_read() -> None:
    model = Repeats()
    with hl.capture(model, "cell") as acts:
        model(torch.ones(2))
    with pytest.warns(
        hl.HooklineWarning, match=says("fired several times in one forward", "cell", "all", "#n")
    ) as warned:
        acts["cell"]
    assert warned[0].filename == __file__
    assert len(acts.calls("cell")) == 1
    assert acts["cell"] is acts.calls("cell")[0]


def test_selecting_by_pattern_narrows_and_further_subscripts_cut() -> None:
    _, acts = captured("h.*", "h.*.mlp", "h.0:input", "head", keep="all")
    assert list(acts.select("h.*")) == ["h.0", "h.1", "h.2"]
    assert list(acts.select("h.{0,2}", "head")) == ["h.0", "h.2", "head"]
    assert list(acts.select("**.mlp")) == ["h.0.mlp", "h.1.mlp", "h.2.mlp"]
    assert list(acts.select("h.*:input")) == ["h.0:input"]
    assert list(acts.select(hl.Site.parse("h.0"))) == ["h.0"]
    last = acts.select("h.*[:, -1]")
    assert list(last) == ["h.0[:, -1]", "h.1[:, -1]", "h.2[:, -1]"]
    assert last["h.1[:, -1]"].equal(acts["h.1"][:, -1])
    assert last["h.1[:, -1]"].untyped_storage().nbytes() == 2 * 8 * 4
    assert list(last.select("h.0[:, -1][0]")) == ["h.0[:, -1][0]"]
    with pytest.raises(hl.NotCaptured, match=says("matches nothing in this cache", "h.*.atn")):
        acts.select("h.*.atn")
    with pytest.raises(hl.NotCaptured, match=says("matches nothing in this cache did", "h.0.mpl", "h.0.mlp")):
        acts.select("h.0.mpl")


def test_a_selected_part_of_a_nested_value_keeps_every_call() -> None:
    model = Nested()
    with hl.capture(model, "", keep="all") as acts:
        for _ in range(3):
            model(torch.randn(2, 4))
    part = acts.select('["hidden"][1][0]')
    assert len(part.calls('["hidden"][1][0]')) == 3
    assert part['["hidden"][1][0]'].equal(acts[""]["hidden"][1][0])


def test_what_is_derived_from_a_cache_still_answers_to_module_objects() -> None:
    model, acts = captured("h.*")
    for derived in (acts.select("h.*"), acts.map(lambda value: value * 2), acts.to(torch.float64), acts - acts):
        assert derived[model.h[1]] is derived["h.1"]


def test_mapping_gives_every_call_of_every_site_to_the_function() -> None:
    model = Repeats()
    with hl.capture(model, "cell", "cell:input", keep="all") as acts:
        model(torch.ones(2))
    before = [value.clone() for value in acts.calls("cell")]
    norms = acts.map(torch.norm)
    assert [value.item() for value in norms.calls("cell")] == pytest.approx([value.norm().item() for value in before])
    assert list(norms) == list(acts)
    assert all(one.equal(other) for one, other in zip(acts.calls("cell"), before, strict=True))


def test_moving_to_a_dtype_leaves_integers_and_other_things_alone() -> None:
    cache = hl.Cache(
        {"a": {"x": torch.ones(2), "mask": torch.tensor([True]), "ids": torch.tensor([3]), "name": "text"}}
    )
    moved = cache.to(torch.bfloat16)["a"]
    assert moved["x"].dtype is torch.bfloat16
    assert (moved["mask"].dtype, moved["ids"].dtype, moved["name"]) == (torch.bool, torch.int64, "text")
    assert cache["a"]["x"].dtype is torch.float32
    assert cache.to("meta")["a"]["ids"].is_meta
    assert cache.to(torch.device("cpu"))["a"]["x"].equal(torch.ones(2))


def test_statistics_are_those_of_all_elements() -> None:
    value = torch.tensor([[1.0, -2.0], [0.0, 5.0]])
    cache = hl.Cache({"a": value, "nested": (value, {"more": value}), "ids": torch.tensor([0, 4]), "text": "text"})
    stats = cache.stats()
    assert stats["a"] == pytest.approx(
        (1.0, value.std(unbiased=False).item(), -2.0, 5.0, math.sqrt(30), 0.25, 0.0, 0.0)
    )
    assert stats["nested"].mean == stats["a"].mean
    assert stats["nested"].norm == pytest.approx(math.sqrt(60))
    assert (stats["ids"].mean, stats["ids"].zeros) == (2.0, 0.5)
    assert math.isnan(stats["text"].mean)
    assert list(stats) == list(cache)
    assert len(stats) == 4


@pytest.mark.parametrize(
    ("value", "mean", "zeros"),
    [
        (torch.tensor([True, False, False, False]), 0.25, 0.75),
        (torch.tensor([3 + 4j, 0]), 2.5, 0.5),
        (torch.eye(2).to_sparse(), 0.5, 0.5),
        (torch.tensor([60000.0, 60000.0], dtype=torch.float16), 60000.0, 0.0),
        (torch.full((3,), 2.0, requires_grad=True), 2.0, 0.0),
    ],
    ids=["bool", "complex", "sparse", "half", "requires grad"],
)
def test_statistics_of_every_kind_of_tensor(value: Tensor, mean: float, zeros: float) -> None:
    numbers = hl.Cache({"a": value}).stats()["a"]
    assert (numbers.mean, numbers.zeros) == (mean, zeros)


def test_statistics_print_as_a_table_in_text_and_html() -> None:
    stats = hl.Cache({"": torch.ones(2), "<b>": torch.tensor([math.nan, 0.0])}).stats()
    assert repr(stats).splitlines()[0].split() == ["site", "mean", "std", "min", "max", "norm", "zeros", "nan", "inf"]
    assert repr(stats).splitlines()[3].split() == ["<b>", "0", "0", "0", "0", "0", "0.5", "0.5", "0"]
    assert "<svg" in stats._repr_html_()
    assert "&lt;b&gt;" in stats._repr_html_()


def test_two_caches_merge_and_the_right_one_wins_with_all_its_calls() -> None:
    model = Repeats()
    with hl.capture(model, "cell", keep="all") as acts:
        model(torch.ones(1, 2))
    left = hl.Cache({"a": 1.0, "cell": 2.0})
    merged = left | acts
    assert list(merged) == ["a", "cell"]
    assert len(merged.calls("cell")) == 3
    assert (acts | {"cell:output": 4.0}).calls("cell") == [4.0]
    assert left.calls("cell") == [2.0]
    with pytest.raises(TypeError):
        left | 3  # type: ignore[operator]


def test_values_are_paired_with_their_gradients() -> None:
    model, x = GPT(), tokens()
    with hl.capture(model, "h.*", "h.*:grad_output", "h.1:input", "h.1:grad_input", "head") as acts:
        model(x).sum().backward()
    values, gradients = acts.with_gradients()
    assert list(values) == list(gradients) == ["h.0", "h.1:input", "h.1", "h.2"]
    assert values["h.1:input"].equal(acts["h.1:input"])
    assert (values * gradients)["h.2"].equal(acts["h.2"] * acts["h.2:grad_output"])
    assert list(acts.select("h.0", "h.0:grad_output").with_gradients()[1]) == ["h.0"]
    with pytest.raises(hl.NotCaptured, match=says("no value here has its")):
        acts.select("head").with_gradients()


def test_each_call_is_paired_with_its_own_gradient() -> None:
    model = Repeats()
    with hl.capture(model, "cell", "cell:grad_output", keep="all") as acts:
        model(torch.ones(1, 2)).sum().backward()
    _, gradients = acts.with_gradients()
    last = torch.ones(1, 2)
    expected = [last @ model.cell.weight @ model.cell.weight, last @ model.cell.weight, last]
    for found, gradient in zip(gradients.calls("cell"), expected, strict=True):
        torch.testing.assert_close(found, gradient)


def test_what_can_not_be_paired_says_why() -> None:
    model = mlp()
    x = torch.ones(1, 4)
    with hl.capture(model, "0", "0:grad_output") as acts:
        output = model(x)
        with pytest.raises(hl.NotCaptured, match=says("no gradient has reached", "0:grad_output")):
            acts.with_gradients()
        output.sum().backward()
        assert list(acts.with_gradients()[0]) == ["0"]
        model(x)
        with pytest.raises(hl.HooklineError, match=says("the gradient at", "0:grad_output")):
            acts.with_gradients()
    with hl.capture(model, "0", "0:grad_output", keep="all") as acts:
        model(x)
        model(x).sum().backward()
    with pytest.raises(hl.HooklineError, match=says("has values and gradient", "0", 2, 1)):
        acts.with_gradients()


def test_a_star_selects_what_each_call_has() -> None:
    model = nn.Sequential(nn.Identity())
    with hl.capture(model, "0", keep="all") as acts:
        model(torch.tensor([[1.0, 2.0, 3.0]]))
        model(torch.tensor([[4.0]]))
    chosen = acts.select("0[:, *]")
    assert {site: [value.item() for value in chosen.calls(site)] for site in chosen} == {
        "0[:, 0]": [1.0, 4.0],
        "0[:, 1]": [2.0],
        "0[:, 2]": [3.0],
    }


def test_two_spellings_of_one_site_are_not_two_values() -> None:
    with pytest.raises(hl.SiteError, match=says("are the same site", "h.0", "h.0:output")):
        hl.Cache({"h.0": 1.0, "h.0:output": 2.0})


@pytest.mark.parametrize("clone", [None, True, False])
def test_a_function_that_writes_into_its_argument_leaves_the_mapped_cache_as_it_was(clone: bool | None) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    x = torch.ones(2, 4)
    with torch.no_grad(), hl.capture(model, "0", ":inputs", clone=clone) as acts:
        output = model(x)
    before = output.clone()

    def zero(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.zero_()
        value["input"].zero_()
        value.clear()
        return value

    zeros = acts.map(zero)
    assert zeros["0"].count_nonzero() == 0
    assert zeros[":inputs"] == {}
    assert acts["0"].equal(before)
    assert output.equal(before)
    assert acts[":inputs"]["input"].equal(torch.ones(2, 4))
    assert x.equal(torch.ones(2, 4))


def test_a_large_value_that_a_function_only_reads_is_not_copied() -> None:
    model = nn.Sequential(nn.Linear(512, 1024))
    with torch.no_grad(), hl.capture(model, "0") as acts:
        model(torch.ones(512, 512))
    same = acts.map(lambda value: value)
    assert torch._C._data_address(same["0"]) == torch._C._data_address(acts["0"])  # type: ignore[attr-defined]


def test_a_function_gets_the_graphs_own_tensors_and_may_not_write_into_them() -> None:
    model = mlp()
    with hl.capture(model, "0", detach=False) as acts:
        loss = model(torch.ones(1, 4)).sum()
    gradients = acts.map(lambda value: torch.autograd.grad(loss, value)[0])
    assert gradients["0"].shape == (1, 8)
    with pytest.raises(hl.EditError, match=says("the function wrote into this", "0")):
        acts.map(lambda value: value.mul_(2))


def test_a_cache_made_of_values_is_read_and_patched_with_like_any_other() -> None:
    model, x = GPT(), tokens()
    cache = hl.Cache({hl.Site.parse("h.0"): torch.zeros(2, 5, 8), "h.1[:,-1]": torch.ones(2, 8)})
    assert list(cache) == ["h.0", "h.1[:, -1]"]
    with hl.patch(model, cache), hl.capture(model, "h.0", "h.1") as acts:
        model(x)
    assert acts["h.0"].count_nonzero() == 0
    assert acts["h.1"][:, -1].equal(torch.ones(2, 8))
    with pytest.raises(hl.SiteError, match=says("wildcard and names no single")):
        hl.Cache({"h.*": 1})


def test_clearing_forgets_the_values_and_the_hooks_go_on() -> None:
    model = mlp()
    hooks = hl.Hooks(model)
    acts = hooks.capture("0", "2[*]", keep="all")
    model(torch.ones(3, 4))
    acts.clear()
    assert len(acts) == 0
    with pytest.raises(hl.NotCaptured, match=says("nothing has passed yet", "0")):
        acts["0"]
    model(torch.ones(3, 4))
    assert len(acts.calls("0")) == len(acts.calls("2[0]")) == 1
    hooks.remove()


def test_the_table_shows_sites_calls_dtypes_and_shapes() -> None:
    model = Nested()
    with hl.capture(model, "", "body", "body:input", keep="all") as acts:
        model(torch.ones(2, 4))
        model(torch.ones(2, 4))
    lines = repr(acts).splitlines()
    assert lines[0].startswith("3 sites, ")
    assert lines[1].split() == ["site", "calls", "dtype", "shape"]
    assert lines[3].split() == ["body:input", "2", "float32", "(2,", "4)"]
    assert lines[5].split()[:3] == ['""', "2", "float32"]
    assert lines[5].endswith("(2, 4), (2, 4), (2, 4)")


@pytest.mark.parametrize(
    "make",
    [
        lambda: hl.Cache(),
        lambda: hl.Cache(
            {"a": None, "b": "text", "c": 3, "d": [], "e": torch.empty(0), "f": torch.ones(1, device="meta")}
        ),
        lambda: hl.Cache({"a": torch.eye(2).to_sparse(), "b": torch.nested.nested_tensor([torch.ones(1)])}),
    ],
    ids=["empty", "odd", "exotic"],
)
def test_every_cache_has_a_table(make: Callable[[], hl.Cache]) -> None:
    assert "site" in repr(make())
    assert "hookline-table" in make()._repr_html_()


def test_the_table_of_an_overwritten_reference_can_still_be_looked_at() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    with hl.capture(model, "*", clone=False) as acts:
        model(torch.randn(1, 2))
    assert "(1, 2)" in repr(acts)
    with pytest.raises(hl.StaleValue):
        acts["0"]


def test_a_saved_cache_is_read_back_with_its_calls_and_structure(tmp_path: Any) -> None:
    model = Nested()
    with hl.capture(model, "", "body", keep="all") as acts:
        for _ in range(2):
            model(torch.randn(2, 4))
    acts.save(tmp_path / "acts.safetensors")
    loaded = hl.Cache.load(tmp_path / "acts.safetensors")
    assert list(loaded) == list(acts)
    assert len(loaded.calls("")) == 2
    assert loaded[""]["hidden"][1].equal(acts[""]["hidden"][1])
    assert (loaded[""]["loss"], loaded[""]["steps"]) == (None, 3)
    torch.testing.assert_close((loaded - acts)["body"], torch.zeros(2, 4))


def test_numbers_have_statistics_too_and_a_wrong_name_says_what_is_near() -> None:
    means = hl.Cache({"h.0": torch.tensor([1.0, 3.0]), "h.1": torch.zeros(2)}).map(lambda value: value.mean().item())
    assert means.stats()["h.0"].mean == 2.0
    assert means.stats()["h.1"].zeros == 1.0
    with pytest.raises(hl.NotCaptured, match=says("has no statistics here", "h.2", "h.0", "h.1")):
        means.stats()["h.2"]


def test_select_takes_lists_and_modules_and_says_what_it_does_not_take() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    _, acts = hl.run(model, torch.ones(1, 2), capture="*")
    assert list(acts.select(["0", "1"])) == ["0", "1"]
    assert list(acts.select(model[2], "0")) == ["2", "0"]
    assert acts.stack(["0", "2"]).shape == (2, 1, 2)
    with pytest.raises(hl.SiteError, match=says("a cache knows its sites by")):
        acts.select(nn.ReLU)
    with pytest.raises(hl.SiteError, match=says("a cache knows its sites")):
        acts.select(re.compile("0|1"))  # type: ignore[arg-type]


def test_a_mapping_merges_with_a_cache_on_its_right_which_wins() -> None:
    cache = hl.Cache({"a": 1.0, "b": 2.0})
    merged = {"b": 3.0, "c": 4.0} | cache
    assert isinstance(merged, hl.Cache)
    assert dict(merged) == {"b": 2.0, "c": 4.0, "a": 1.0}


def test_a_dtype_may_be_given_to_a_cache_by_its_name() -> None:
    cache = hl.Cache({"a": torch.ones(2)})
    assert cache.to("float16")["a"].dtype is torch.float16
    assert cache.to("cpu")["a"].dtype is torch.float32
    with pytest.raises(hl.HooklineError, match=says("is neither a device nor", "float17")):
        cache.to("float17")


def test_a_device_that_is_not_here_is_refused_in_one_line() -> None:
    with pytest.raises(hl.HooklineError, match=says("target= can't be used here", "cuda:99")):
        hl.Cache({"a": torch.ones(2)}).to("cuda:99")


def test_a_cache_that_exists_loads_nothing(tmp_path: Path) -> None:
    acts = hl.Cache({"a": torch.ones(2)})
    acts.save(tmp_path / "acts.safetensors")
    with pytest.raises(hl.HooklineError, match=says("write acts hl")):
        hl.Cache().load(path=tmp_path / "acts.safetensors")
    with pytest.raises(hl.EditError, match=says("to read a file", "acts.safetensors")):
        hl.Cache("acts.safetensors")  # type: ignore[arg-type]


def test_values_and_gradients_are_paired_by_with_gradients() -> None:
    acts = hl.Cache({"a": torch.ones(2), "a:grad_output": torch.ones(2)})
    with pytest.raises(hl.HooklineError, match=says("only one has values", "a", "a:grad_output")):
        _ = acts.select("a") * acts.select("a:grad_output")
    with pytest.raises(hl.HooklineError, match=says("only one cache has it", "a", "b")):
        _ = hl.Cache({"a": 1.0}) * hl.Cache({"b": 1.0})


def test_a_cache_is_made_of_a_mapping_and_maps_functions_only() -> None:
    with pytest.raises(hl.EditError, match=says("a Cache is made of")):
        hl.Cache([("a", torch.ones(2))])  # type: ignore[arg-type]
    cache = hl.Cache({"a": torch.ones(2)})
    with pytest.raises(TypeError, match=says("map takes a function of", "mean")):
        cache.map("mean")  # type: ignore[arg-type]


def test_reading_by_a_pattern_or_a_part_points_to_select() -> None:
    cache = hl.Cache({"h.0": torch.ones(2, 3), "h.1": torch.ones(2, 3)})
    with pytest.raises(hl.NotCaptured, match=says("is not one site that", "h.*", "h.*")):
        cache["h.*"]
    with pytest.raises(hl.NotCaptured, match=says("is not one site that", "h.0[:, -1]")):
        cache["h.0[:, -1]"]
    assert cache.select() == cache
