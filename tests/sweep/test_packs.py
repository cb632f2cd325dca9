"""`hl.sweep(run=)`: many places in one run give what a run for each place gives, or say why they have to run alone."""

from __future__ import annotations

import re
import warnings
from typing import Any, ClassVar

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
    "where",
    [
        "h.*[:, *]", "h.*.mlp.*", "h.1.attn:input[:, *]", "h.*.attn/linear#0[..., *]", "h.{0,2}[..., ::2]", "**",
        "h.*[0]",
    ],
)  # fmt: skip
def test_places_in_one_run_give_what_each_gives_alone(model, x, where) -> None:
    assert is_packed(both(model, where, (x,)))


def test_the_output_may_be_nested_and_the_change_a_part_of_it(x) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> dict[str, Any]:
            hidden = self.split(self.body(x))
            return {"logits": self.head(hidden[1]["inner"]), "all": hidden, "name": "pair"}

        def split(self, value: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return value, {"inner": value * 2}

    where = ['split()[1]["inner"][:, *]', "body[..., *]"]
    found = both(Pair(), where, {"x": x}, lambda output: total(output["logits"]))
    assert is_packed(found)
    assert len(found) == 5 + 8


def test_samples_may_be_in_the_second_dimension() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.GRU(4, 6))
    found = both(model, ["0[*]", "1[0][..., *]"], (torch.randn(5, 2, 3),), lambda output: total(output[0]))
    assert is_packed(found)
    assert len(found) == 5 + 6


def test_convolutions_and_functions_are_places(model) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(5))
    images = torch.randn(2, 3, 8, 8)
    net(images)
    assert is_packed(both(net.eval(), ["0[:, *]", "2[:, *]", "4"], (images,)))


class Mixing(nn.Module):
    """Each sample sees the mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        return self.two(y - y.mean(0, keepdim=True).mean(1, keepdim=True))


class Capacity(nn.Module):
    """Two experts, each of which takes at most half of the tokens of a batch, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 2), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        chosen = self.gate(tokens).argmax(-1)
        result = tokens.clone()
        for number, expert in enumerate(self.experts):
            taken = (chosen == number).nonzero().flatten()[: len(tokens) // 2]
            result[taken] = expert(tokens[taken])
        return result.view(x.shape)


class Counting(nn.Module):
    """Its output depends on how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.calls = nn.Linear(8, 8), nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.two(self.one(x) * self.calls)


class Fixed(nn.Module):
    """It knows the size of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).view(2, 5, 8))


class Noisy(nn.Module):
    """It adds noise from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.noise = nn.Linear(8, 8), nn.Linear(8, 8), torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x) + torch.rand(x.shape, generator=self.noise))


class Mean(nn.Module):
    """The mean over the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


def normalising() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Flatten(0, 1), nn.BatchNorm1d(8), nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (Mixing, says("samples of its batch influence")),
        (normalising, says("it changes its buffers", "BatchNorm")),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8)), says("drops elements at random", "1")),
        (Fixed, says("raises with two copies")),
        (Noisy, says("is not twice that with one copy")),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), Mean()), says("has no rows for samples")),
    ],
)  # fmt: skip
def test_a_model_that_can_not_be_packed_is_run_place_by_place_and_says_why(x, build, reason) -> None:
    torch.manual_seed(0)
    model = build()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.warns(hl.HooklineWarning, match=reason):
        packed = hl.sweep(model, nn.Linear, total, run=(x,))
    alone = hl.sweep(model, nn.Linear, total, run=(x,), batch=1)
    assert dict(packed) == dict(alone) or isinstance(model, Noisy)
    assert re.search(reason, "\n".join(packed.notes))
    assert all(tensor.equal(state[name]) for name, tensor in model.state_dict().items())


def test_a_model_that_counts_its_runs_starts_each_from_the_same_count(x) -> None:
    model = Counting()
    assert is_packed(both(model, nn.Linear, (x,)))
    assert model.calls == 0


def test_experts_with_a_capacity_are_noticed() -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        model, x = Capacity(), torch.randn(2, 6, 8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", hl.HooklineWarning)
            packed = hl.sweep(model, "norm[:, *]", total, run=(x,), edit=torch.neg)
        alone = hl.sweep(model, "norm[:, *]", total, run=(x,), batch=1, edit=torch.neg)
        for site, value in alone.items():
            assert packed[site] == pytest.approx(value, rel=1e-5), (seed, site)


def test_a_metric_may_be_of_a_value_inside_and_nothing_behind_it_is_computed(model, x) -> None:
    ran = []
    model.head.register_forward_hook(lambda *_: ran.append(1))
    found = both(model, ["h.0[:, *]", "h.1.norm[:, *]"], (x,), metric_at="h.1.mlp")
    assert is_packed(found)
    assert not ran
    expected = hl.run(model, x, patch={"h.0[:, 3]": 0.0}, capture="h.1.mlp")[1]["h.1.mlp"]
    assert found["h.0[:, 3]"] == pytest.approx(total(expected).item())
    with pytest.raises(hl.NeverFired, match=says("was not reached", "h.2")):
        hl.sweep(model, "h.2", total, run=(x,), metric_at="h.1.mlp")
    with pytest.raises(hl.SiteError, match=says("is one site")):
        hl.sweep(model, "h.0", total, run=(x,), metric_at="h.*")


def test_modules_before_the_first_change_do_not_run_again(model, x) -> None:
    rows: dict[str, list[int]] = {"h.0": [], "h.2": []}
    for name, seen in rows.items():
        model.get_submodule(name).mlp.register_forward_hook(lambda _m, _a, out, seen=seen: seen.append(len(out)))
    found = hl.sweep(model, "h.{1,2}[:, *]", total, run=(x,), batch=6)
    assert len(found) == 10
    # The first run, the one with two copies, and the four cells that are compared with runs of their own.
    assert rows["h.0"] == [2, 4, 2, 2, 2, 2]
    assert rows["h.2"] == [2, 4, 12, 2, 2, 2, 2]  # It does not run for cells at its own output.


def test_batch_says_how_many_copies_share_a_run(model, x) -> None:
    sizes: list[int] = []
    model.head.register_forward_hook(lambda _m, _a, out: sizes.append(len(out) // 2))
    hl.sweep(model, "h.*[:, *]", total, run=(x,), batch=4)
    assert max(sizes) == 4
    sizes.clear()
    hl.sweep(model, "h.*[:, *]", total, run=(x,), batch=1)
    assert sizes == [1] * 16
    with pytest.raises(hl.HooklineError, match="batch="):
        hl.sweep(model, "h.*", total, run=(x,), batch=0)
    with pytest.raises(hl.HooklineError, match=says("batch= needs run=")):
        hl.sweep(model, "h.*", lambda: 1.0, batch=2)


def test_runs_that_do_not_fit_into_memory_are_halved(model, x) -> None:
    sizes: list[int] = []

    def limit(_module: Any, _args: Any, out: Tensor) -> None:
        sizes.append(len(out) // 2)
        if len(out) > 8:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    handle = model.head.register_forward_hook(limit)
    found = both(model, "h.*[:, *]", (x,))
    handle.remove()
    assert is_packed(found)
    assert [size for size in sizes if size > 2][:2] == [6, 3]
    assert dict(found) == pytest.approx(dict(hl.sweep(model, "h.*[:, *]", total, run=(x,), batch=1)))


def test_a_loss_of_the_whole_batch_is_noticed(x) -> None:
    class WithLoss(GPT):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            logits = super().forward(x)
            return {"loss": logits.square().mean(), "logits": logits}

    torch.manual_seed(0)
    model = WithLoss()
    with pytest.warns(hl.HooklineWarning, match=says("which the model gives for", "loss")):
        packed = hl.sweep(model, "h.*[:, *]", lambda output: output["loss"], run=(x,))
    assert dict(packed) == dict(hl.sweep(model, "h.*[:, *]", lambda output: output["loss"], run=(x,), batch=1))
    assert is_packed(both(model, "h.*[:, *]", (x,), lambda output: total(output["logits"])))


def test_the_arguments_of_the_run_stay_as_they_are(model, x) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.add_(1))

    before = x.clone()
    both(InPlace(), "inner.h.*", (x,))
    assert x.equal(before)


def test_threads_may_sweep_one_model_at_once(model, x) -> None:
    from concurrent.futures import ThreadPoolExecutor

    expected = dict(hl.sweep(model, "h.*[:, *]", total, run=(x,)))
    with ThreadPoolExecutor(4) as pool:
        sweeps = [pool.submit(hl.sweep, model, "h.*[:, *]", total, run=(x,)) for _ in range(8)]
        assert all(dict(one.result()) == expected for one in sweeps)


class Named(Capacity):
    def __init__(self) -> None:
        super().__init__()
        self.capacity_factor = 2.0


class Masked(Mixing):
    """One of its outputs is very large, as that of a masked token is."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).clone()
        y[..., 0] = torch.finfo(y.dtype).min
        return y


class FromOutside(nn.Module):
    """What one module makes is kept outside the model, for another one."""

    held: ClassVar[dict[str, Tensor]] = {}

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.keeps, self.linear = keeps, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.keeps:
            self.held["y"] = y
            return y
        return y * self.held["y"]


@pytest.mark.parametrize(
    ("build", "where", "options"),
    [
        (lambda: Mixing().bfloat16(), "one[:, *]", {"edit": lambda value: value * 0.5}),
        (lambda: Mixing().bfloat16(), "one[:, *]", {}),
        (Masked, "one[:, *]", {}),
        (Named, "norm[:, *]", {}),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()), "0[:, *]", {"edit": lambda v: v + torch.randn_like(v)}),
        (lambda: nn.Sequential(FromOutside(True), nn.Linear(8, 8), FromOutside(False)), "*", {}),
    ],
)  # fmt: skip
def test_influence_between_samples_is_found_or_there_is_none(x, build, where, options) -> None:
    torch.manual_seed(0)
    model = build()
    given = x.to(next(model.parameters()).dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hl.HooklineWarning)
        packed = hl.sweep(model, where, total, run=(given,), **options)
    alone = hl.sweep(model, where, total, run=(given,), batch=1, **options)
    assert dict(packed) == pytest.approx(dict(alone), rel=1e-6)


def test_parts_of_the_output_that_are_not_cut_can_not_be_measured_by_mistake(x) -> None:
    class Kept:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    class Odd(GPT):
        def forward(self, x: Tensor) -> dict[str, Any]:
            logits = super().forward(x)
            return {"logits": logits, "mean": logits.mean().item(), "kept": Kept(logits)}

    torch.manual_seed(0)
    model = Odd()
    for metric in (lambda output: output["mean"], lambda output: output["kept"].tensor.sum()):
        with pytest.warns(hl.HooklineWarning, match="metric reads '(mean|kept)'"):
            packed = hl.sweep(model, "h.*[:, *]", metric, run=(x,))
        assert dict(packed) == dict(hl.sweep(model, "h.*[:, *]", metric, run=(x,), batch=1))
    assert is_packed(both(model, "h.*[:, *]", (x,), lambda output: total(output["logits"])))


def test_places_without_rows_are_run_alone_and_named(x) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.at, self.one = nn.Embedding(5, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x + self.at(torch.arange(5)))

    with pytest.warns(hl.HooklineWarning, match=says("places whose values have no")):
        both(Positions(), ["at[*]", "one[:, *]"], (x,))


def test_tokens_that_a_change_refuses_are_refused_in_a_pack_too(x) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(hl.SiteError, match=says("each new token is the")):
        hl.sweep(model, "0[:, @-1]", total, run=(x,))


class Folding(nn.Module):
    """Heads become rows in a module before the change, and rows of other copies come between those of one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.fold, self.two, self.three = nn.Linear(8, 8), Fold(), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.three(self.two(self.fold(self.one(x))))
        return torch.cat(y.chunk(2, 0), -1)


class FoldedInside(nn.Module):
    """What its child returns has rows of each half in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.fold, self.linear = Fold(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(self.linear(self.fold(x)).chunk(2, 0), -1)


class Fold(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(x.chunk(2, -1), 0)


def test_where_a_module_can_not_be_left_out_none_is(x) -> None:
    assert is_packed(both(Folding(), "one[..., *]", (x,)))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), FoldedInside(), nn.Linear(8, 8))
    assert is_packed(both(model, "2[..., *]", (x,)))


def test_memory_that_runs_out_on_a_cpu_halves_the_next_runs(model, x) -> None:
    def limit(_module: Any, _args: Any, out: Tensor) -> None:
        if len(out) > 8:
            raise RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
            )

    handle = model.head.register_forward_hook(limit)
    found = both(model, "h.*[:, *]", (x,))
    handle.remove()
    assert is_packed(found)


def test_a_value_whose_rows_share_memory_is_written_row_by_row(x) -> None:
    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.Identity(), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.norm(x.mean(1, keepdim=True).expand(x.shape)))

    assert is_packed(both(Spread(), "norm[:, *]", (x,)))


@pytest.mark.parametrize("batch", [None, 1])
def test_parts_of_another_run_that_do_not_fit_are_refused_in_a_pack_too(model, x, batch) -> None:
    _, other = hl.run(model, x.flip(0), capture="h.*")
    for change in (torch.Tensor.half, lambda value: value[:1].expand(3, -1, -1)):
        with pytest.raises(hl.EditError, match="h.0"):
            hl.sweep(model, other.map(change).select("h.*[:, *]"), total, run=(x,), batch=batch)


def test_whole_numbers_may_be_set_in_a_pack_too(x) -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.round, self.linear = Rounds(), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.round(x).float())

    assert is_packed(both(Steps(), "round[:, *]", (x,), patch=2))


class Rounds(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 10).int()


def test_places_at_one_module_are_divided_evenly_among_runs(model, x) -> None:
    sizes: list[int] = []
    model.head.register_forward_hook(lambda _m, _a, out: sizes.append(len(out) // 2))
    hl.sweep(model, "h.0[..., *]", total, run=(x,), batch=4)
    assert [size - 1 for size in sizes if size > 2] == [3, 3, 2]  # Without the unchanged copy.


def test_a_list_that_is_no_list_of_batches_is_refused(model, x) -> None:
    for run in ([x, x], []):
        with pytest.raises(hl.HooklineError, match=says("a list is several batches")):
            hl.sweep(model, "h.*", total, run=run)


def test_notes_of_all_batches_are_kept(x) -> None:
    class Size(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x) - (self.one(x).mean(0) if x.sum() > 0 else 0)

    run = [(-x.abs(),), (x.abs(),)]
    with pytest.warns(hl.HooklineWarning, match="run alone"):
        found = hl.sweep(Size(), "one[..., *]", lambda output: output.norm(), run=run)
    assert is_packed(found)
    assert any("run alone" in note for note in found.notes)


def test_each_batch_may_have_a_metric_of_its_own(model, x) -> None:
    runs, metrics = [(x,), (x + 1,)], [lambda output: output.norm(), lambda output: -output.norm()]
    found = hl.sweep(model, "h.*", metrics, run=runs)
    for number, (run, metric) in enumerate(zip(runs, metrics, strict=True)):
        alone = hl.sweep(model, "h.*", metric, run=run)
        assert [value[number].item() for value in found.values()] == pytest.approx(list(alone.values()))
    with pytest.raises(hl.HooklineError, match=says("and metric is a list", 2, 1)):
        hl.sweep(model, "h.*", metrics[:1], run=runs)


class LateMixing(nn.Module):
    """Samples influence each other only where the second value has zeros, as one that was zeroed does."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.two(self.one(x))
        return self.three(y - y.mean(0) if (y == 0).any() else y)


def test_influence_that_shows_in_a_later_run_is_found_there(x) -> None:
    torch.manual_seed(0)
    with pytest.warns(hl.HooklineWarning, match=says("samples of its batch influence")):
        both(LateMixing(), ["one[:, *]", "two[:, *]", "three[:, *]"], (x,), batch=6)


def test_what_modules_that_are_left_out_would_have_kept_outside_is_found_missing(x) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), FromOutside(True), nn.Linear(8, 8), FromOutside(False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hl.HooklineWarning)  # In runs of different sizes, it raises.
        both(model, ["0[:, *]", "2[:, *]"], (x,), batch=3)


class CountsZeros(nn.Module):
    """It changes itself only in runs in which a value was changed."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.zeros = nn.Linear(8, 8), nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        self.zeros += int((y == 0).sum())
        return self.two(y) * (1 + self.zeros)


@pytest.mark.parametrize("batch", [1, None])
def test_what_only_changed_runs_change_is_put_back_too(x, batch) -> None:
    torch.manual_seed(0)
    model = CountsZeros()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hl.HooklineWarning)
        found = hl.sweep(model, "one[:, *]", total, run=(x,), batch=batch)
    fresh = CountsZeros()
    fresh.load_state_dict(model.state_dict())
    expected = total(hl.run(fresh, x, patch={"one[:, 3]": 0.0})).item()
    assert found["one[:, 3]"] == pytest.approx(expected)
    assert model.zeros == 0
