"""Gradients at every port, compared with torch.autograd.grad on a forward by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hookline as hl
from tests.errors.wording import says
from tests.support.models import GPT, Scaled, WritesThenReads, loss_of, tokens


def stages_of_gpt(model: GPT, x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Run the forward of GPT by hand. Every value of interest is a separate tensor."""
    values: dict[str, Tensor] = {}
    for number, block in enumerate(model.h):
        name = f"h.{number}"
        normed = F.layer_norm(x, block.norm.normalized_shape, block.norm.weight, block.norm.bias)
        values[f"{name}.norm"] = normed
        values[f"{name}.attn"] = F.linear(normed, block.attn.weight, block.attn.bias)
        residual = x + values[f"{name}.attn"] * 0.5
        entered = residual.view_as(residual)
        values[f"{name}.mlp:input"] = entered
        values[f"{name}.mlp.0"] = F.linear(entered, block.mlp[0].weight, block.mlp[0].bias)
        values[f"{name}.mlp.1"] = F.relu(values[f"{name}.mlp.0"])
        values[f"{name}.mlp"] = F.linear(values[f"{name}.mlp.1"], block.mlp[2].weight, block.mlp[2].bias)
        x = values[name] = residual + values[f"{name}.mlp"]
    return values, F.linear(x, model.head.weight, model.head.bias)


def test_the_gradient_of_every_output_and_of_a_residual_input_equals_the_oracle() -> None:
    model, x = GPT(), tokens()
    values, output = stages_of_gpt(model, x)
    expected = dict(zip(values, torch.autograd.grad(loss_of(output), list(values.values())), strict=True))
    sites = {name: name.replace(":input", ":grad_input") if ":" in name else f"{name}:grad_output" for name in values}
    with hl.capture(model, *sites.values()) as acts:
        loss_of(model(x)).backward()
    for name, site in sites.items():
        torch.testing.assert_close(acts[site], expected[name], msg=site)


def test_observing_gradients_leaves_the_output_and_all_other_gradients_bit_identical() -> None:
    model, x = GPT(), tokens().requires_grad_()
    plain = torch.autograd.grad(loss_of(model(x)), [x, *model.parameters()])
    with hl.capture(model, "**:grad_output", "**:grad_input", "h.*:grad_inputs"):
        watched = torch.autograd.grad(loss_of(model(x)), [x, *model.parameters()])
    assert all(one.equal(other) for one, other in zip(plain, watched, strict=True))
    assert x.grad is None


def test_all_arguments_have_their_gradients_by_name_and_none_where_there_is_none() -> None:
    class Mixes(nn.Module):
        def forward(self, x: Tensor, *rest: Tensor, gate: Tensor, mask: Tensor, scale: float) -> Tensor:
            return x * gate * mask * scale + rest[0] * 3

    x, gate, more = (torch.randn(2, requires_grad=True) for _ in range(3))
    model, mask = nn.ModuleDict({"mixes": Mixes()}), torch.tensor([True, False])
    with hl.capture(model, "mixes:grad_inputs", 'mixes:grad_inputs["gate"]') as acts:
        model["mixes"](x * 1, more * 1, gate=gate * 1, mask=mask, scale=2.0).sum().backward()
    gradients = acts["mixes:grad_inputs"]
    assert list(gradients) == ["x", "rest", "gate", "mask", "scale"]
    assert gradients["x"].equal(gate * mask * 2)
    assert gradients["rest"][0].tolist() == [3.0, 3.0]
    assert gradients["gate"].equal(x * mask * 2)
    assert gradients["mask"] is None
    assert acts['mixes:grad_inputs["gate"]'].equal(gradients["gate"])


@pytest.mark.parametrize(
    "before",
    [nn.Identity(), nn.Flatten(0), nn.Dropout(0.5).eval(), nn.Unflatten(1, (2, 2))],
    ids=lambda module: repr(module),
)
@pytest.mark.parametrize(
    "after", [nn.ReLU(inplace=True), nn.Hardtanh(inplace=True)], ids=lambda module: type(module).__name__
)
def test_a_view_or_an_alias_that_is_then_overwritten_gets_the_gradient_of_its_old_value(
    before: nn.Module, after: nn.Module
) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), before, after), torch.randn(3, 4)
    value = before(model[0](x).clone()).clone()
    expected = torch.autograd.grad(loss_of(after(value.clone())), value)[0]
    with hl.capture(model, "1:grad_output") as acts:
        loss_of(model(x)).backward()
    torch.testing.assert_close(acts["1:grad_output"], expected)


def test_a_module_that_overwrites_its_input_gets_the_gradient_of_what_entered() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)), torch.randn(3, 4)
    entered = model[0](x)
    expected = torch.autograd.grad(loss_of(model[2](torch.relu(entered))), entered)[0]
    with hl.capture(model, "1:grad_input", "1:grad_inputs") as acts:
        loss_of(model(x)).backward()
    torch.testing.assert_close(acts["1:grad_input"], expected)
    torch.testing.assert_close(acts["1:grad_inputs"]["input"], expected)


class WritesAndIsUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = WritesThenReads()

    def forward(self, x: Tensor) -> Tensor:
        hidden = x * 2
        early = hidden * 7
        return early + self.inner(hidden) + hidden


def test_a_module_that_uses_its_input_before_and_after_overwriting_it_gets_the_sum() -> None:
    model, x = WritesAndIsUsed(), torch.ones(2, requires_grad=True)
    with hl.capture(model, "inner:grad_input") as acts:
        model(x).sum().backward()
    # The module adds 3 before the write and 5 after it; the caller adds 5, because it uses the written tensor again.
    assert acts["inner:grad_input"].tolist() == [13.0, 13.0]
    assert x.grad is not None
    assert x.grad.tolist() == [40.0, 40.0]


def test_a_gradient_that_comes_in_two_parts_is_patched_as_one_or_refused() -> None:
    model, x = WritesAndIsUsed(), torch.ones(2, requires_grad=True)
    refusal = ""
    with hl.patch(model, {"inner:grad_input": 1.0}):
        try:
            model(x).sum().backward()
        except hl.HooklineError as error:
            refusal = str(error)
    if refusal:
        assert refusal.startswith("'inner:grad_input'")
    else:
        assert x.grad is not None
        assert x.grad.tolist() == [16.0, 16.0]


def test_an_activation_in_place_is_no_obstacle_when_a_part_of_the_model_is_called_by_itself() -> None:
    model, x = GPT(), tokens()
    block = model.h[0]
    residual = x + block.attn(block.norm(x))
    hidden = block.mlp[0](residual)
    expected = torch.autograd.grad(loss_of(residual + block.mlp[2](torch.relu(hidden))), hidden)[0]
    with hl.capture(model, "h.0.mlp.0:grad_output", "h.0.mlp.1:grad_input") as acts:
        loss_of(block(x)).backward()
    torch.testing.assert_close(acts["h.0.mlp.0:grad_output"], expected)
    torch.testing.assert_close(acts["h.0.mlp.1:grad_input"], expected)


def test_an_edited_gradient_of_a_module_that_overwrites_its_input_takes_effect() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)), torch.randn(3, 4)
    entered = Scaled.apply(model[0](x), lambda gradient: gradient * 3)
    expected = torch.autograd.grad(loss_of(model[2](torch.relu(entered))), model[0].weight)[0]
    with hl.edit(model, "1:grad_input", lambda gradient: gradient * 3):
        loss_of(model(x)).backward()
    torch.testing.assert_close(model[0].weight.grad, expected)


class Views(nn.Module):
    """Returns two views of one activation and uses the activation a third time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.linear(x)
        return hidden.view(2, 2, 2), hidden.view(4, 2), hidden * 5


def test_views_of_one_activation_have_each_the_gradient_of_its_own_uses() -> None:
    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.views = Views()

        def forward(self, x: Tensor) -> Tensor:
            one, two, three = self.views(x)
            return one.sum() * 3 + two.sum() * 7 + three.sum() * 100

    with hl.capture(model := Caller(), "views:grad_output", "views.linear:grad_output") as acts:
        model(torch.randn(2, 3)).backward()
    assert [gradient.unique().tolist() for gradient in acts["views:grad_output"]] == [[3.0], [7.0], [100.0]]
    assert acts["views.linear:grad_output"].unique().tolist() == [510.0]


class Nests(nn.Module):
    """Returns a dict with a tuple, None and an integer in it, and one tensor twice."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = x * 2
        return {"pair": (y, x.exp()), "none": None, "indices": x.argmax(), "again": [y]}


class UsesNested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nests = Nests()

    def forward(self, x: Tensor) -> Tensor:
        value = self.nests(x)
        return value["pair"][0] * 3 + value["again"][0] * 5 + value["pair"][1]


def test_the_gradient_of_a_nested_value_has_its_structure() -> None:
    with hl.capture(model := UsesNested(), "nests:grad_output", 'nests:grad_output["pair"][0]') as acts:
        model(torch.ones(2, requires_grad=True)).sum().backward()
    gradient = acts["nests:grad_output"]
    assert list(gradient) == ["pair", "none", "indices", "again"]
    assert gradient["pair"][1].tolist() == [1.0, 1.0]
    assert (gradient["none"], gradient["indices"]) == (None, None)
    assert acts['nests:grad_output["pair"][0]'].tolist() == [8.0, 8.0]
    assert gradient["pair"][0].tolist() == gradient["again"][0].tolist() == [8.0, 8.0]


def test_a_tensor_that_stands_twice_in_a_value_has_its_gradient_edited_once() -> None:
    x = torch.ones(2, requires_grad=True)
    with hl.edit(model := UsesNested(), 'nests:grad_output["again"]', lambda gradient: gradient / 2):
        model(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * torch.full((2,), 4.0) + torch.ones(2).exp())
    x.grad = None
    with hl.edit(model, "nests:grad_output", lambda gradient: gradient / 2):
        model(x).sum().backward()
    torch.testing.assert_close(x.grad, (2 * torch.full((2,), 8.0) + torch.ones(2).exp()) / 2)


class Repeats(nn.Module):
    """Calls one module three times."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.cell(x))
        return x


def calls_of(model: Repeats, x: Tensor) -> tuple[list[Tensor], Tensor]:
    outputs = []
    for _ in range(3):
        outputs.append(F.linear(x, model.cell.weight, model.cell.bias))
        x = torch.tanh(outputs[-1])
    return outputs, x


def test_the_gradients_of_several_calls_are_listed_in_the_order_of_the_calls() -> None:
    model, x = Repeats(), torch.randn(2, 3)
    outputs, last = calls_of(model, x)
    expected = torch.autograd.grad(loss_of(last), outputs)
    with hl.capture(model, "cell", "cell:grad_output", "cell:grad_output#1", keep="all") as acts:
        loss_of(model(x)).backward()
    for kept, value in ((acts.calls("cell"), outputs), (acts.calls("cell:grad_output"), expected)):
        assert len(kept) == 3
        for one, other in zip(kept, value, strict=True):
            torch.testing.assert_close(one, other.detach())
    torch.testing.assert_close(acts["cell:grad_output"], expected[2])
    torch.testing.assert_close(acts["cell#1:grad_output"], expected[1])


def test_a_number_of_calls_keeps_the_gradients_of_the_latest_calls() -> None:
    model, x = Repeats(), torch.randn(2, 3)
    outputs, last = calls_of(model, x)
    expected = torch.autograd.grad(loss_of(last), outputs)
    with hl.capture(model, "cell:grad_output", keep=2) as acts:
        loss_of(model(x)).backward()
    torch.testing.assert_close(torch.stack(acts.calls("cell:grad_output")), torch.stack(expected[1:]))


def test_gradients_of_several_calls_in_one_forward_are_not_dropped_in_silence() -> None:
    model = Repeats()
    with hl.capture(model, "cell:grad_output") as acts:
        loss_of(model(torch.randn(2, 3))).backward()
    with pytest.warns(hl.HooklineWarning, match=says("fired several times in one forward", "cell:grad_output", "all")):
        acts["cell:grad_output"]


def test_the_gradient_of_one_call_alone_can_be_edited() -> None:
    model, x = Repeats(), torch.randn(2, 3)
    value = x
    for number in range(3):
        value = F.linear(value, model.cell.weight, model.cell.bias)
        value = torch.tanh(Scaled.apply(value, lambda gradient: gradient * 0) if number == 1 else value)
    expected = torch.autograd.grad(loss_of(value), model.cell.weight)[0]
    with hl.patch(model, {"cell#1:grad_output": 0.0}):
        loss_of(model(x)).backward()
    torch.testing.assert_close(model.cell.weight.grad, expected)
    assert expected.count_nonzero()


def test_two_backward_passes_are_two_calls_and_the_latest_is_read() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), torch.randn(2, 3)
    with hl.capture(model, "0:grad_output", keep="all") as acts:
        output = model(x)
        output.sum().backward(retain_graph=True)
        (output.sum() * 10).backward()
    first, second = acts.calls("0:grad_output")
    torch.testing.assert_close(first * 10, second)
    assert acts["0:grad_output"] is second


@pytest.mark.parametrize("detach", [True, False])
def test_a_double_backward_lists_the_second_pass_after_the_first(detach: bool) -> None:
    model, x = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh()), torch.randn(2, 3, requires_grad=True)
    hidden = F.linear(x, model[0].weight)
    first = torch.autograd.grad(loss_of(torch.tanh(hidden)), hidden, create_graph=True)[0]
    expected = torch.autograd.grad(loss_of(first @ model[0].weight), hidden)[0]
    with hl.capture(model, "0:grad_output", keep="all", detach=detach) as acts:
        gradient = torch.autograd.grad(loss_of(model(x)), x, create_graph=True)[0]
        loss_of(gradient).backward(retain_graph=True)
    kept = acts.calls("0:grad_output")
    torch.testing.assert_close(kept[0].detach(), first.detach())
    torch.testing.assert_close(kept[1].detach(), expected.detach())
    assert kept[0].requires_grad is not detach
    if not detach:
        again = torch.autograd.grad(loss_of(kept[0] @ model[0].weight), x)[0]
        assert again.isfinite().all()
    model.zero_grad()


def test_gradients_of_a_packed_sequence_are_kept_though_its_constructor_refuses_them():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 5, batch_first=True)

        def forward(self, words, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(words, lengths, batch_first=True)
            return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]

    model = Tagger()
    with hl.capture(model, "lstm", "lstm:grad_output") as acts:
        model(torch.ones(3, 6, 4), torch.tensor([6, 4, 2])).sum().backward()
    assert acts["lstm:grad_output"][0].data.equal(torch.ones(12, 5))
    assert acts["lstm:grad_output"][0].batch_sizes is None
    assert "(12, 5)" in repr(acts)
