"""The memory cost of capturing, to the byte: only the kept values count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from benchmarks.allocations import Bytes, allocated_by

VALUE = 4 * 64 * 256  # Bytes per activation.
DEPTH = 6
x = torch.randn(64, 256)


def model_of(inplace: bool = False) -> nn.Sequential:
    return nn.Sequential(*[one for _ in range(DEPTH) for one in (nn.Linear(256, 256), nn.ReLU(inplace))])


def references(model: nn.Module) -> Callable[[], dict[str, Tensor]]:
    """Return a function that runs the model with plain torch hooks, which keep the model's tensors."""

    def run() -> dict[str, Tensor]:
        kept: dict[str, Tensor] = {}
        handles = [
            module.register_forward_hook(lambda _module, _args, output, name=name: kept.update({name: output.detach()}))
            for name, module in model.named_children()
        ]
        model(x)
        for handle in handles:
            handle.remove()
        return kept

    return run


def captured(model: nn.Module, **options: Any) -> Callable[[], hl.Cache]:
    def run() -> hl.Cache:
        with hl.capture(model, "*", **options) as acts:
            model(x)
        return acts

    return run


@pytest.mark.parametrize("options", [{}, {"clone": False}, {"limit": "1 GB"}], ids=str)
def test_a_capture_holds_what_references_hold_and_not_a_byte_more(options):
    model = model_of()
    with torch.no_grad():
        bare, kept = allocated_by(lambda: model(x)), allocated_by(references(model))
        ours = allocated_by(captured(model, **options))
    assert bare == Bytes(2 * VALUE, VALUE)
    assert ours == kept == Bytes(2 * DEPTH * VALUE, 2 * DEPTH * VALUE)


def test_what_is_cloned_is_copied_while_the_model_holds_its_own():
    with torch.no_grad():
        peak, left = allocated_by(captured(model_of(), clone=True))
    assert left == 2 * DEPTH * VALUE
    assert peak == left + 2 * VALUE


def test_what_the_model_overwrites_is_all_that_is_copied():
    model = model_of(inplace=True)
    with torch.no_grad():
        held = allocated_by(references(model))
        ours = allocated_by(captured(model))
    assert held.left == DEPTH * VALUE  # Each ReLU overwrites the output of its Linear, so half of the values are left.
    assert ours.left == 2 * DEPTH * VALUE


@pytest.mark.skipif(
    torch.__version__ < "2.5", reason="needs torch 2.5, before which what autograd saves is copied at once"
)
@pytest.mark.parametrize("options", [{}, {"clone": False}], ids=str)
def test_what_is_kept_for_backward_costs_nothing_to_capture(options):
    model = model_of()

    def capturing() -> tuple[Tensor, hl.Cache]:
        with hl.capture(model, nn.ReLU, **options) as acts:  # Autograd saves the output of a ReLU.
            output = model(x)
        return output, acts

    assert allocated_by(capturing) == allocated_by(lambda: model(x))


def test_gradients_that_are_captured_are_what_passes_and_nothing_else():
    model = model_of()

    def gradients(*where: str) -> tuple[Tensor | hl.Cache, ...]:
        with hl.capture(model, *where) as acts:
            output = model(x)
        return *torch.autograd.grad(output.square().sum(), model[0].weight), acts

    held = allocated_by(lambda: gradients("0")).left
    assert allocated_by(lambda: gradients("0", "{1,3,5,7,9}:grad_output")).left == held + 5 * VALUE


@pytest.mark.parametrize("values", [0, 1, 4])
def test_with_a_limit_and_a_disk_no_more_than_that_is_held(values):
    with torch.no_grad():
        peak, left = allocated_by(captured(model_of(), limit=values * VALUE, spill=True))
    assert left == values * VALUE
    assert peak <= (values + 2) * VALUE  # Two more for the input and output of the running layer.


def test_reading_what_is_on_disk_keeps_one_value_at_a_time_in_memory():
    acts = captured(model_of(), limit=0, spill=True)()
    assert allocated_by(lambda: acts["0"]) == Bytes(VALUE, VALUE)
    assert allocated_by(lambda: repr(acts)) == Bytes(0, 0)
    assert allocated_by(lambda: acts.select("*")) == Bytes(0, 0)
    assert allocated_by(lambda: acts.map(lambda value: value.mean())).peak < 3 * VALUE
    assert allocated_by(lambda: acts.select("*[:, 0]")).peak < 3 * VALUE
    one = hl.Cache({"0": acts["0"]})
    assert allocated_by(lambda: acts.stats()).peak <= allocated_by(lambda: one.stats()).peak + 2 * VALUE


def test_saving_what_is_on_disk_keeps_one_value_at_a_time_in_memory(tmp_path):
    acts = captured(model_of(), limit=0, spill=True)()
    assert allocated_by(lambda: acts.save(tmp_path / "acts")).peak <= 2 * VALUE
    again = hl.Cache.load(tmp_path / "acts")
    assert all(again[site].equal(acts[site]) for site in acts)


def test_a_table_for_a_notebook_takes_a_few_elements_of_each_value():
    kept = captured(model_of())()
    large = hl.Cache({"0": torch.randn(1024, 64, 128).transpose(0, 2), "1": torch.ones(1).expand(1 << 30)})
    for acts in (kept, large):
        assert allocated_by(lambda acts=acts: acts._repr_html_() and None).peak < 1 << 18
