"""`hl.sweep`: it changes one place at a time, and measures the effect of each change."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import GPT, mlp, tokens


@pytest.fixture
def model() -> GPT:
    return GPT()


@pytest.fixture
def x() -> torch.Tensor:
    return tokens()


def test_each_place_alone_is_set_to_zero_and_the_model_is_left_as_it_was(model, x) -> None:
    bare = model(x)
    found = hl.sweep(model, "h.*.mlp", lambda: model(x).sum())
    assert list(found) == ["h.0.mlp", "h.1.mlp", "h.2.mlp"]
    for site, measured in found.items():
        assert type(measured) is float
        assert measured == hl.run(model, x, patch={site: 0.0}).sum().item()
    assert found.base == bare.sum().item()
    assert found[hl.Site("h.1.mlp")] == found["h.1.mlp"]
    assert model(x).equal(bare)


def test_the_change_may_be_a_value_a_function_or_leaving_out(model, x) -> None:
    def measure() -> torch.Tensor:
        return model(x).sum()

    assert hl.sweep(model, "h.1", measure, patch=2.0)["h.1"] == hl.run(model, x, patch={"h.1": 2.0}).sum().item()
    assert hl.sweep(model, "h.1", measure, edit=torch.tanh)["h.1"] == hl.run(model, x, edit={"h.1": torch.tanh}).sum()
    assert hl.sweep(model, "h.1", measure, skip=True)["h.1"] == hl.run(model, x, skip="h.1").sum().item()


def test_a_cache_of_another_run_is_put_in_place_by_place(model, x) -> None:
    _, other = hl.run(model, tokens(), capture=["h.*", "head"])
    found = hl.sweep(model, other, lambda: model(x).norm())
    assert list(found) == ["h.0", "h.1", "h.2", "head"]
    assert found["head"] == pytest.approx(other["head"].norm().item())
    assert all(found[site] == hl.run(model, x, patch={site: other[site]}).norm().item() for site in other)
    tokens_alone = hl.sweep(model, other.select("h.*[:, *]"), lambda: model(x).norm())
    assert len(tokens_alone) == 3 * 5
    assert tokens_alone["h.2[:, 3]"] == hl.run(model, x, patch={"h.2[:, 3]": other["h.2"][:, 3]}).norm().item()


def test_a_mapping_may_name_several_places_at_once(model, x) -> None:
    found = hl.sweep(model, {"h.*": 0.0, "head": 1.0}, lambda: model(x).sum())
    assert list(found) == ["h.0", "h.1", "h.2", "head"]
    assert found["head"] == x.shape[0] * x.shape[1] * 4


def test_stars_stand_for_all_that_a_first_run_shows(model, x) -> None:
    units = hl.sweep(model, "h.0.mlp[..., *]", lambda: model(x).sum())
    assert list(units) == [f"h.0.mlp[..., {unit}]" for unit in range(8)]
    assert units["h.0.mlp[..., 3]"] == hl.run(model, x, patch={"h.0.mlp[..., 3]": 0.0}).sum().item()
    assert "h.0/add#1" in hl.sweep(model, "h.0/*", lambda: model(x).sum())


def test_what_is_never_called_is_told_by_a_warning_if_a_pattern_meant_it_and_else_by_an_error() -> None:
    model = nn.Sequential(nn.MultiheadAttention(4, 2))
    model.forward = lambda value: model[0](value, value, value)[0]  # type: ignore[method-assign]
    x = torch.randn(3, 4)
    with pytest.warns(hl.HooklineWarning, match=says("out_proj' was not called")):
        found = hl.sweep(model, "**", lambda: model(x).sum(), edit=lambda value: value)
    assert list(found) == ["0"]
    with pytest.raises(hl.NeverFired, match=says("was not called")):
        hl.sweep(model, "0.out_proj", lambda: model(x).sum())


def test_a_pattern_of_which_nothing_fires_is_an_error_with_the_reason() -> None:
    class Attention(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x)

    model, x = nn.Sequential(Attention(), Attention()), torch.ones(1, 2, 4)
    for where in ("**/softmax", ["**/softmax"], {"**/softmax": 0.0}):
        with pytest.raises(hl.NeverFired, match=says("did not fire scaled_dot_product_attention", "0/softmax")):
            hl.sweep(model, where, lambda: model(x).sum())
    with pytest.warns(hl.HooklineWarning, match=says("did not fire", "0/softmax")):
        assert list(hl.sweep(model, ["**/softmax", "1"], lambda: model(x).sum())) == ["1"]


def test_gradients_are_places_too(model, x) -> None:
    def measure() -> torch.Tensor:
        model.zero_grad()
        model(x).sum().backward()
        return model.h[0].attn.weight.grad.norm()

    found = hl.sweep(model, "h.*:grad_output", measure)
    assert found["h.1:grad_output"] == 0
    assert found.base > 0


def test_a_tensor_stays_one_without_its_graph_and_the_table_shows_its_mean(model, x) -> None:
    found = hl.sweep(model, "h.*", lambda: model(x).norm(dim=-1))
    assert found["h.0"].shape == found.base.shape == (2, 5)
    assert not found["h.0"].requires_grad
    assert f"{found['h.0'].mean().item():.4g}" in str(found)
    assert "mean of what was measured without" in str(found)


def test_it_prints_as_a_table_with_bars() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), nn.Identity())
    count = iter([4.0, 1.0, 3.0])
    found = hl.sweep(model, "*", lambda: (model(torch.ones(1)), next(count))[1])
    assert str(found).splitlines() == [
        "2 places, one at a time set to 0.0; measured without: 4",
        "site  measured  change",
        "────  ────────  ──────  ────────────────────",
        "0            1      -3  ████████████████████",
        "1            3      -1  ██████▋",
    ]
    assert "</svg>" not in found._repr_html_()


def test_a_change_that_gives_a_nan_matters_most() -> None:
    values = {f"h.{number}": float(number) for number in range(100)} | {"h.3": float("nan")}
    shown = str(hl.Sweep(0.0, values))
    assert "h.3 " in shown
    assert "h.4 " not in shown
    assert len(f"{hl.Sweep(0.0, values):all}".splitlines()) == 103


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m, x: hl.sweep(m, "*", lambda: None), hl.HooklineError, says("a number or a tensor")),
        (lambda m, x: hl.sweep(m, "*", lambda: m(x) * 1j), hl.HooklineError, "not complex64"),
        (lambda m, x: hl.sweep(m, "*", lambda: 3), hl.HooklineError, says("does it run this model")),
        (lambda m, x: hl.sweep(m, "9", lambda: m(x).sum()), hl.SiteError, "'9' matches nothing"),
        (lambda m, x: hl.sweep(m, "*", x, patch=1.0, skip=True), hl.EditError, says("patch= or skip=")),
        (lambda m, x: hl.sweep(m, {"0": 0.0}, x, edit=torch.tanh), hl.EditError, says("give its sites alone")),
        (
            lambda m, x: hl.sweep(m, {"0": 0.0, "*": 1.0}, lambda: m(x).sum()),
            hl.EditError,
            says("is asked for twice", "0"),
        ),
        (lambda m, x: hl.sweep(m, "0", x, skip=0.5), hl.EditError, says("skip= of a sweep is", "0.5")),
        (lambda m, x: hl.sweep(m, "0:input", lambda: m(x).sum(), skip=True), hl.SiteError, says("skipped as a whole")),
    ],
)
def test_what_makes_no_sense_is_an_error_that_says_so(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call(mlp(), torch.ones(3, 4))


def test_the_model_is_free_of_hooks_when_measuring_fails(model, x) -> None:
    calls = iter(range(3))

    def measure() -> float:
        model(x)
        return 1 / (1 - next(calls))

    with pytest.raises(ZeroDivisionError):
        hl.sweep(model, "h.*", measure)
    assert len(hl.attached(model)) == 0


def test_progress_is_shown_where_it_is_asked_for(model, x, capsys) -> None:
    hl.sweep(model, "h.*", lambda: model(x).sum())
    assert capsys.readouterr() == ("", "")
    hl.sweep(model, "h.*", lambda: model(x).sum(), progress=True)
    shown = capsys.readouterr()
    assert "3 of 3" in shown.err
    assert "h.2" in shown.err
    assert not shown.out


def test_it_can_be_drawn(model, x) -> None:
    pytest.importorskip("matplotlib")
    figure = hl.sweep(model, "h.*", lambda: model(x).sum()).plot()
    assert len(figure.axes[0].get_lines()) + len(figure.axes[0].collections) > 0


def test_the_table_shows_what_was_measured_also_where_the_change_is_no_number():
    assert "1e+20" in str(hl.Sweep(float("inf"), {"h.0": 1e20}))
    assert re.search(r"h\.0 +3 ", str(hl.Sweep(1e20, {"h.0": 3.0})))


@pytest.mark.parametrize("measure", [None, 3, "loss", torch.ones(1), [1.0]])
def test_what_can_not_be_called_is_no_measure(measure: Any) -> None:
    with pytest.raises(
        hl.HooklineError,
        match=says("metric is a function that runs"),
    ):
        hl.sweep(mlp(), "0", measure)


def test_a_measure_that_needs_arguments_is_refused_before_anything_runs() -> None:
    with pytest.raises(hl.HooklineError, match=says("metric is a function that")):
        hl.sweep(mlp(), "0", lambda model: 1.0)  # type: ignore[arg-type, misc]
    with pytest.raises(hl.EditError, match=says("edit= takes a function of", 3)):
        hl.sweep(mlp(), "0", lambda: 1.0, edit=3)  # type: ignore[arg-type]


def test_a_function_that_returns_nothing_at_any_place_is_refused_since_it_changes_nothing(model, x) -> None:
    def forgets_to_return(value: torch.Tensor) -> None:
        value * 0

    with pytest.raises(hl.EditError, match=says("forgets_to_return returned None at every")):
        hl.sweep(model, "h.*", lambda: model(x).sum(), edit=forgets_to_return)

    seen: list[torch.Tensor] = []
    only_first = hl.sweep(
        model, "h.*", lambda: model(x).sum(), edit=lambda v: None if seen else seen.append(v) or v * 0
    )
    assert only_first["h.0"] != only_first.base == only_first["h.1"]


def test_a_sweep_is_read_by_any_spelling_of_a_site_and_says_what_it_does_not_have(model, x) -> None:
    found = hl.sweep(model, "h.*", lambda: model(x).sum())
    assert found["h.1:output"] == found["h.1"]
    assert "h.1:output" in found
    assert "h.7" not in found
    with pytest.raises(hl.NotCaptured, match=says("was not measured in this", "h.7", "h.0")):
        found["h.7"]
    with pytest.raises(hl.NotCaptured, match=says("read by site")):
        found[model.h[0]]


def test_an_empty_mapping_and_an_array_that_is_measured_are_refused_with_their_reason(model, x) -> None:
    with pytest.raises(hl.EditError, match="sweep what"):
        hl.sweep(model, {}, lambda: model(x).sum())
    with pytest.raises(hl.HooklineError, match=says("metric returns a number or")):
        hl.sweep(model, "h.*", lambda: model(x).detach().numpy())
    found = hl.sweep(model, "h.*", lambda: model(x).detach().numpy().mean())
    assert found.base == pytest.approx(model(x).mean().item())


def test_dropout_that_draws_in_every_run_is_told_by_a_warning() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    x = torch.ones(2, 4)
    with pytest.warns(hl.HooklineWarning, match=says("drops different elements", "1")):
        hl.sweep(model, "*", lambda: model(x).sum())
    model[1].p = 0.0
    hl.sweep(model, "*", lambda: model(x).sum())
    model[1].p = 0.5
    hl.sweep(model.eval(), "*", lambda: model(x).sum())


def test_a_place_may_be_some_calls_or_tokens() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 20, "bos_token_id": 0, "eos_token_id": None}
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, initializer_range=0.3)).eval()
    ids, mask = torch.randint(20, (2, 5)), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])

    def written() -> torch.Tensor:
        found = model.generate(
            ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        return torch.stack(found.logits).norm()

    where = [
        "transformer.h.*[:, @prompt[-1]]",
        "transformer.h.*[:, @new]",
        "transformer.h.1#{0,2}",
        "transformer.h.1#*",
    ]
    found = hl.sweep(model, where, written)
    tokens = [f"transformer.h.{layer}[:, {part}]" for layer in range(2) for part in ("@prompt[-1]", "@new")]
    places = [*tokens, "transformer.h.1#{0,2}", *[f"transformer.h.1#{call}" for call in range(4)]]
    assert sorted(found) == sorted(places)
    for site, measured in found.items():
        with hl.patch(model, {site: 0.0}):
            assert measured == pytest.approx(written().item())
    with hl.capture(model, "transformer.h.*[:, @new]") as acts:
        written()
    zeroed = hl.sweep(model, acts.map(lambda value: value * 0), written)
    assert zeroed["transformer.h.1[:, @new]"] == pytest.approx(found["transformer.h.1[:, @new]"])
    latest_ones = {
        "transformer.h.1#-1": says("the latest is known only at the end"),
        "transformer.h.1[:, @-1]": says("each new token is the last for a moment"),
    }
    for latest, told in latest_ones.items():
        with pytest.raises(hl.SiteError, match=told):
            hl.sweep(model, latest, written)
    with pytest.raises(hl.NeverFired, match=says("no such token passed", 5, 5)):
        hl.sweep(model, "transformer.h.1[:, @new]", lambda: model(ids).logits.norm())
