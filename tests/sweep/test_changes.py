"""What a sweep puts in at each place: values, means, other rows, other runs, functions, skips."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import GPT, tokens
from tests.support.sweeps import both, is_packed, total


@pytest.fixture
def model() -> GPT:
    return GPT()


@pytest.fixture
def x() -> Tensor:
    return tokens()


@pytest.mark.parametrize(
    "change",
    [
        {"patch": 2.0}, {"patch": "mean"}, {"patch": "resample"}, {"edit": torch.tanh},
        {"edit": lambda value: value.mul_(3)}, {"edit": lambda value: value.mean(0, keepdim=True).expand_as(value)},
        {"skip": True}, {"against": (torch.ones(2, 5, 8),)}, {"against": (torch.ones(2, 5, 8),), "patch": "mean"},
    ],
)  # fmt: skip
def test_each_change_is_the_same_in_a_pack(model, x, change) -> None:
    assert is_packed(both(model, "h.*.mlp", (x,), **change))


def test_an_error_of_a_change_names_its_place(model, x) -> None:
    with (
        pytest.raises(hl.EditError, match=says("shape does not fit where", "h.0[:, 0]", "(7,)")),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", hl.HooklineWarning)
        hl.sweep(model, "h.*[:, *]", total, run=(x,), patch=torch.ones(7))
    with pytest.raises(hl.EditError, match=says("returned None at every place")):
        hl.sweep(model, "h.*", total, run=(x,), edit=lambda value: None)


def test_the_mean_is_that_of_the_batch_and_other_rows_are_no_rows_own(model) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 5, 8)
    _, acts = hl.run(model, x, capture="h.1")
    seen: list[Tensor] = []

    def look(value: Tensor) -> None:
        seen.append(value)

    for word in ("mean", "resample"):
        with hl.edit(model, "h.2:input", look):
            hl.sweep(model, "h.1[:, 2]", total, run=(x,), patch=word, batch=1)
        changed = seen[-1]
        assert changed[:, [0, 1, 3, 4]].equal(acts["h.1"][:, [0, 1, 3, 4]])
        if word == "mean":
            torch.testing.assert_close(changed[:, 2], acts["h.1"][:, 2].mean(0).expand(4, 8))
        else:
            sources = [[row.equal(other) for other in acts["h.1"][:, 2]].index(True) for row in changed[:, 2]]
            assert sorted(sources) == [0, 1, 2, 3]
            assert all(source != row for row, source in enumerate(sources))
    with pytest.raises(hl.HooklineError, match=says("takes the values of other")):
        hl.sweep(model, "h.1", total, run=(x[:1],), patch="resample")


def test_the_mean_of_a_store_is_put_in(model, tmp_path) -> None:
    torch.manual_seed(0)
    x, data = torch.randn(2, 5, 8), torch.randn(24, 5, 8)
    store = hl.harvest(model.eval(), data, "h.*", to=tmp_path / "rows", batch_size=8, progress=False)
    _, acts = hl.run(model, data, capture="h.*")
    mean = {site: value.mean(0).expand(2, 5, 8) for site, value in acts.items()}
    found = both(model, ["h.*", "h.*[:, *]"], (x,), patch="mean", against=store)
    for site, value in found.items():
        place = hl.Site.parse(site)
        taken = mean[place.path][place.subscripts[0]] if place.index else mean[place.path]
        expected = total(hl.run(model, x, patch={site: taken.contiguous()})).item()
        assert value == pytest.approx(expected, rel=1e-4), site
    with pytest.raises(hl.NotCaptured, match=says("is not in against=", "head")):
        hl.sweep(model, "head", total, run=(x,), patch="mean", against=store)
    with pytest.raises(hl.EditError, match=says("the rows of a store")):
        hl.sweep(model, "h.*", total, run=(x,), against=store)


def test_a_cache_may_be_the_source(model, x) -> None:
    _, other = hl.run(model, tokens() + 1, capture="h.*")
    given = hl.sweep(model, "h.*[:, *]", total, run=(x,), against=other)
    for site, value in given.items():
        place = hl.Site.parse(site)
        expected = total(hl.run(model, x, patch={site: other[place.path][place.subscripts[0]]})).item()
        assert value == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch": "meen"}, says("is not mean or resample", "meen", "mean")),
        ({"patch": 1.0, "against": (torch.ones(1),)}, says("against= says where the values")),
        ({"edit": torch.tanh, "against": (torch.ones(1),)}, says("against= says where the values")),
        ({"edit": torch.tanh, "skip": True}, says("a sweep makes one change")),
        ({"skip": 1}, says("skip= of a sweep is")),
        ({"edit": 3}, says("edit= takes a function of")),
    ],
)
def test_changes_that_do_not_go_together_are_refused(model, x, options, message) -> None:
    with pytest.raises(hl.EditError, match=message):
        hl.sweep(model, "h.*", total, run=(x,), **options)


def test_a_place_that_is_passed_several_times_is_told_apart_by_its_calls() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.cell(self.cell(self.cell(x)).tanh())

    torch.manual_seed(0)
    model, x, other = Loop(), torch.randn(2, 8), torch.randn(2, 8)
    with pytest.raises(hl.EditError, match=says("times in a run", "cell", 3, "cell#0")):
        hl.sweep(model, "cell", total, run=(x,), against=(other,))
    found = both(model, "cell#*", (x,), patch=0.5)
    assert list(found) == ["cell#0", "cell#1", "cell#2"]
    assert is_packed(found)


def test_several_batches_are_joined_and_pairs_are_measured_one_by_one(model) -> None:
    torch.manual_seed(0)
    runs, others = ([(torch.randn(size, 5, 8),) for size in (2, 3)] for _ in range(2))

    def each(output: Tensor) -> Tensor:
        return output.flatten(1).norm(dim=1)

    found = hl.sweep(model, "h.*[:, *]", each, run=runs, against=others)
    assert found["h.1[:, 2]"].shape == found.base.shape == (5,)
    alone = [
        hl.run(model, *run, patch={"h.1[:, 2]": hl.run(model, *other, capture="h.1")[1]["h.1"][:, 2]})
        for run, other in zip(runs, others, strict=True)
    ]
    torch.testing.assert_close(found["h.1[:, 2]"], torch.cat([each(output) for output in alone]).detach())
    with pytest.raises(hl.HooklineError, match=says("batches and against= has", 2, 1)):
        hl.sweep(model, "h.*", each, run=runs, against=others[:1])
    with pytest.raises(hl.HooklineError, match=says("is not a place in", "h.0[:, 4]")):
        hl.sweep(model, "h.*[:, *]", each, run=[(torch.randn(2, size, 8),) for size in (4, 5)])


@pytest.mark.parametrize("options", [{"skip": True}, {"patch": "mean"}, {"edit": lambda value: -value}])
def test_modules_may_write_into_their_input(options) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Sigmoid())
    x = torch.randn(4, 8)
    expected = model[3](model[2](model[0](x)))
    found = both(model, "*", (x,), **options)
    assert is_packed(found)
    if "skip" in options:
        assert found["1"] == pytest.approx(total(expected).item())


@pytest.mark.parametrize("patch", ["mean", "resample"])
def test_a_metric_that_calls_backward_may_take_values_of_its_own_run(patch) -> None:
    model, x = GPT(), tokens()

    def metric() -> float:
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return float(model.head.weight.grad.norm())

    assert len(hl.sweep(model, "h.*", metric, patch=patch)) == 3


def test_gradients_with_run_are_refused_with_what_to_do() -> None:
    with pytest.raises(hl.HooklineError, match=says("leave it out")):
        hl.sweep(GPT(), "h.1:grad_output", total, run=(tokens(),))
