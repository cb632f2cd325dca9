"""Actions at functions: patch, skip, stop, results written in place, hooks switched off and on; and hl.sites."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hookline as hl
from tests.errors.wording import says
from tests.support.models import ORDER, Attention, Returns, Transformer, stages_of_attention, words
from tests.support.states import same, state_of


def test_a_patched_function_gives_what_the_forward_by_hand_gives() -> None:
    attention, x = Attention(), words()
    stages = stages_of_attention(attention, x)
    pattern = torch.softmax(torch.randn_like(stages["softmax#0"]), -1)
    mixed = (pattern @ stages["transpose#2"]).transpose(1, 2).flatten(2)
    for output in (
        hl.run(attention, x, patch={"/softmax": pattern}),
        hl.run(attention, x, edit={"/softmax#0": lambda value: pattern}),
        hl.run(attention, x, skip={"/softmax": pattern}),
        hl.run(attention, x, patch={"/matmul#1": pattern @ stages["transpose#2"]}),
    ):
        torch.testing.assert_close(output, attention.out(mixed))
    assert hl.run(attention, x, patch={"/{matmul,flatten}": 0.0}).equal(attention.out.bias.expand(2, 5, 8))
    with pytest.raises(hl.EditError, match=says("given where tuple of passes", "/chunk#0", "0.0", 3)):
        hl.run(attention, x, patch={"/*": 0.0})


def test_a_skipped_function_is_not_computed_and_passes_its_first_argument_on() -> None:
    attention, x = Attention(), words()
    stages = stages_of_attention(attention, x)
    mixed = (stages["div#0"] @ stages["transpose#2"]).transpose(1, 2).flatten(2)
    torch.testing.assert_close(hl.run(attention, x, skip="/softmax"), attention.out(mixed))
    failing = Returns(lambda x: torch.linalg.cholesky(x) + 1)  # A skipped function can't raise.
    assert hl.run(failing, -torch.eye(2), skip="/cholesky").equal(1 - torch.eye(2))
    assert hl.run(failing, -torch.eye(2), skip={"/cholesky": torch.zeros(2, 2)}).equal(torch.ones(2, 2))
    twice = Returns(lambda x: (x * 2) * 3)
    assert hl.run(twice, torch.ones(2), skip="/mul#1").tolist() == [2.0, 2.0]
    assert hl.run(twice, torch.ones(2), skip="/m*").tolist() == [1.0, 1.0]


def test_a_forward_stops_after_a_function() -> None:
    model, x = Transformer(), words()
    plain = hl.run(model, x, capture="h.0.attn/softmax")[1]
    later: list[str] = []
    model.h[0].attn.out.register_forward_hook(lambda *_: later.append("out"))
    output, acts = hl.run(model, x, capture="h.0.attn/softmax", stop=True)
    assert output is None
    assert not later
    assert acts["h.0.attn/softmax"].equal(plain["h.0.attn/softmax"])
    with pytest.raises(hl.SiteError, match=says("name the functions to stop", "h.0.attn/mat*")):
        hl.run(model, x, capture="h.0.attn/mat*", stop=True)  # The number of matching functions is unknown in advance.
    hooks = hl.Hooks(model)
    hooks.stop_after("h.0.attn/matmul#1")
    assert model(x) is None
    assert not later
    hooks.remove()
    assert model(x) is not None
    assert later == ["out"]


def test_hooks_at_functions_are_switched_off_and_on_narrowed_and_removed() -> None:
    model, x = Transformer(), words()
    plain, before = model(x), state_of(model)
    hooks = hl.Hooks(model)
    acts = hooks.capture("h.*.attn/softmax", "h.0.attn")
    hooks.edit("h.1.attn/softmax", lambda value: value * 0, name="blind")
    blind = model(x)
    assert not blind.equal(plain)
    assert acts["h.1.attn/softmax"].sum() > 0  # Captures and edits act in the order they were added.
    assert [hook.kind for hook in hooks.at("h.1.attn/softmax")] == ["capture", "edit"]
    assert len(hooks.at("h.0.attn")) == 2  # The capture of the module and the one of its softmax.
    hooks["blind"].deactivate()
    assert model(x).equal(plain)
    with hooks["blind"].activated():
        assert model(x).equal(blind)
    hooks["blind"].activate()
    assert model(x).equal(blind)
    assert "h.1.attn/softmax" in repr(hooks)
    assert "h.1.attn/softmax" in repr(hl.attached(model))
    hooks.of("edit").remove()
    assert model(x).equal(plain)
    hooks.remove()
    assert state_of(model) == before


def test_every_block_counts_its_calls_anew() -> None:
    model, x = Attention(), words()
    hooks = hl.Hooks(model)
    acts = hooks.capture("#1/softmax", "/softmax", keep="all")
    model(x)
    assert "#1/softmax" not in acts
    model(x * 2)
    assert len(acts.calls("/softmax")) == 2
    assert acts["#1/softmax"].equal(acts.calls("/softmax")[1])
    with hooks:
        model(x * 3)
        model(x * 4)
    assert acts["#1/softmax"].equal(acts.calls("/softmax")[3])
    hooks.remove()


IN_PLACE: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "operator": ("mul_", lambda y: y.__imul__(2)),
    "method": ("relu_", lambda y: y.relu_()),
    "function": ("relu_", lambda y: torch.relu_(y)),
    "inplace=True": ("relu", lambda y: F.relu(y, inplace=True)),
    "dropout": ("dropout", lambda y: F.dropout(y, 0.5, True, True)),
    "setitem": ("setitem", lambda y: y.__setitem__(0, 3.0)),
    "out": ("add", lambda y: torch.add(y, 1, out=y)),
    "copy_": ("copy_", lambda y: y.copy_(torch.ones(3))),
}


@pytest.mark.parametrize("training", [True, False, None], ids=["with gradients", "without", "inference mode"])
@pytest.mark.parametrize("form", IN_PLACE)
def test_a_changed_result_of_a_function_that_writes_is_seen_by_everyone_who_holds_the_tensor(
    form: str, training: bool | None
) -> None:
    name, write = IN_PLACE[form]
    if form == "out" and training:
        return  # Torch can't differentiate functions with out=.

    def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x * 1
        alias, reshaped = y, y.view(4, 3)
        write(y)
        return y, alias, reshaped.view(2, 6)

    with torch.inference_mode(training is None):
        check_in_place(Returns(forward), torch.randn(2, 2, 3, requires_grad=bool(training)), name)


def check_in_place(model: nn.Module, x: Tensor, name: str) -> None:
    """Hook a function that writes in place. The model returns the written tensor and two aliases of it."""
    torch.manual_seed(1)
    plain = model(x)
    torch.manual_seed(1)
    output, acts = hl.run(model, x, capture=[f"/{name}", "/view#0"])
    assert same(output, plain)
    assert acts[f"/{name}"].equal(plain[0])
    assert acts["/view#0"].equal(x.view(4, 3))  # The value before the write.
    value = torch.randn(2, 2, 3)
    for hooked in (
        {"patch": {f"/{name}": value}},
        {"edit": {f"/{name}": lambda _: value}},
        {"skip": {f"/{name}": value}},
    ):
        y, alias, reshaped = hl.run(model, x, **hooked)
        assert y is alias
        assert y.equal(value)
        assert reshaped.equal(value.view(2, 6))
    part = hl.run(model, x, patch={f"/{name}[1, 0]": 5.0})
    assert part[2][1, :3].tolist() == [5.0, 5.0, 5.0]
    torch.manual_seed(1)
    assert same(model(x), plain)


def test_what_a_function_with_out_gives_is_the_tensor_that_was_given_to_it() -> None:
    buffer = torch.zeros(3)
    model = Returns(lambda x: torch.add(x, 1, out=buffer))
    assert hl.run(model, torch.zeros(3), patch={"/add": 4.0}) is buffer
    assert buffer.tolist() == [4.0, 4.0, 4.0]
    assert hl.run(model, torch.zeros(3), capture='/add:inputs["out"]')[0].tolist() == [1.0, 1.0, 1.0]


def test_a_tensor_that_out_makes_room_in_is_captured_patched_and_skipped() -> None:
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        buffer = torch.empty(0)
        return torch.add(x, 1, out=buffer), buffer

    model, x = Returns(forward), torch.zeros(3)
    (output, buffer), acts = hl.run(model, x, capture=["/add", "/add:inputs"])
    assert output is buffer
    assert acts["/add"].tolist() == [1.0, 1.0, 1.0]
    assert acts["/add:inputs"]["out"].shape == (0,)
    for hooked in ({"patch": {"/add": 4.0}}, {"skip": {"/add": torch.full((3,), 4.0)}}):
        output, buffer = hl.run(model, x, **hooked)
        assert output is buffer
        assert buffer.tolist() == [4.0, 4.0, 4.0]


def test_skipping_a_function_that_writes_leaves_the_tensor_as_it_is() -> None:
    def forward(x: Tensor) -> Tensor:
        y = x + 0
        y[0] = 5
        y.mul_(2)
        return y

    model, x = Returns(forward), torch.ones(2)
    assert hl.run(model, x, skip="/setitem").tolist() == [2.0, 2.0]
    assert hl.run(model, x, skip="/mul_").tolist() == [5.0, 1.0]
    assert hl.run(model, x, capture="/setitem")[1]["/setitem"].tolist() == [5.0, 1.0]
    assert hl.run(model, x, patch={'/setitem:inputs["value"]': 7}).tolist() == [14.0, 2.0]


@pytest.mark.parametrize("run", [(words(),), {"x": words()}], ids=["arguments", "keywords"])
def test_sites_lists_what_would_run_in_order_with_shapes_and_lines_and_touches_nothing(run: Any) -> None:
    model = Transformer().train()
    before, seed = state_of(model), torch.get_rng_state()
    sites = hl.sites(model, "h.0.attn/*", run=run)
    names = [name.removesuffix("#0") if name[0] in "cdsf" else name for name in ORDER]  # These functions run once.
    assert [str(site) for site in sites] == [f"h.0.attn/{name}" for name in names]
    assert state_of(model) == before
    assert torch.get_rng_state().equal(seed)
    lines = Path(inspect.getfile(Attention)).read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if "F.softmax(scores" in line)
    (row,) = [row for row in repr(sites).splitlines() if "/softmax " in row]
    assert re.search(rf"h\.0\.attn/softmax .*float32.*\(2, 2, 5, 5\).*\b{number}\b", row), row
    both = [f"h.{layer}.attn/softmax" for layer in (0, 1)]
    assert [str(site) for site in hl.sites(model, "h.*.attn/softmax", run=run)] == both
    with_one_that_did_not_run = hl.sites(model, "h.0.attn/softmax", "h.0.attn/relu", run=run)
    assert [str(site) for site in with_one_that_did_not_run] == ["h.0.attn/softmax", "h.0.attn/relu"]


def test_sites_runs_for_real_where_fake_tensors_do_not_suffice_and_still_touches_nothing() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.dropout(self.norm(x), 0.5, True)
            return y.exp() if (x > 0).all().item() else y.log()

    model, x = Looks(), torch.ones(4, 3)
    before, state, seed = state_of(model), model.norm.running_mean.clone(), torch.get_rng_state()
    assert [str(site) for site in hl.sites(model, "/*", run=(x,))] == ["/dropout", "/gt", "/all", "/exp"]
    assert model.norm.running_mean.equal(state)
    assert torch.get_rng_state().equal(seed)
    assert set(state_of(model)) == set(before)
