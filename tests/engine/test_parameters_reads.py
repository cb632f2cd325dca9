"""`head.weight:param`: the value a forward reads, captured and changed without touching the real parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from tests.errors.wording import says
from tests.support.models import GPT, Autoencoder, Shares, loss_of, mlp, tokens
from tests.support.states import state_of


def with_weight(model: nn.Module, name: str, value: Tensor) -> nn.Module:
    """Return a copy of the model with another value for one parameter: the expected effect of a patch."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.get_parameter(name).copy_(value)
    return twin


def names(model: nn.Module, *where: Any) -> list[str]:
    return [str(site) for site in hl.sites(model, *where)]


def test_a_parameter_is_seen_as_it_is_read() -> None:
    model, x = mlp(), torch.randn(3, 4)
    before, plain = state_of(model), model(x)
    with hl.capture(model, "0.weight:param", "2.bias:param[1]", "2.weight:param[:, 0]") as acts:
        assert torch.equal(model(x), plain)
    assert list(acts) == ["0.weight:param", "2.weight:param[:, 0]", "2.bias:param[1]"]
    assert torch.equal(acts["0.weight:param"], model[0].weight)
    assert torch.equal(acts["2.weight:param[:, 0]"], model[2].weight[:, 0])
    assert acts["2.bias:param[1]"] == model[2].bias[1]
    assert type(acts["0.weight:param"]) is Tensor
    assert not acts["0.weight:param"].requires_grad
    assert state_of(model) == before


def test_what_was_captured_stays_what_it_was_when_the_model_is_trained_on() -> None:
    model, x = mlp(), torch.randn(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight, addresses = model[0].weight.detach().clone(), [parameter.data_ptr() for parameter in model.parameters()]
    _, acts = hl.run(model, x, capture=["0.weight:param", '2.weight/linear:inputs["weight"]'])
    with hl.edit(model, "0.weight:param", lambda value: value * 2), hl.edit(model, "2.bias:param", lambda value: None):
        model(x).sum().backward()
    optimizer.step()
    assert torch.equal(acts["0.weight:param"], weight)
    assert not torch.equal(model[0].weight, weight)
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses, "the parameters moved in memory"


VALUES: dict[str, tuple[Callable[[nn.Module], hl.Hooks], Callable[[Tensor], Tensor]]] = {
    "a number": (lambda model: hl.patch(model, {"2.weight:param": 0.5}), lambda w: torch.full_like(w, 0.5)),
    "a tensor": (lambda model: hl.patch(model, {"2.weight:param": torch.eye(8)[:2]}), lambda w: torch.eye(8)[:2]),
    "a row": (
        lambda model: hl.patch(model, {"2.weight:param": torch.arange(8.0)}),
        lambda w: torch.arange(8.0).repeat(2, 1),
    ),
    "a part": (
        lambda model: hl.patch(model, {"2.weight:param[0]": 0.0}),
        lambda w: w * torch.tensor([[0.0], [1.0]]),
    ),
    "an edit": (lambda model: hl.edit(model, "2.weight:param", lambda w: w * 2), lambda w: w * 2),
    "an edit of a part": (
        lambda model: hl.edit(model, "2.weight:param[0]", lambda w: w * 2),
        lambda w: w * torch.tensor([[2.0], [1.0]]),
    ),
    "an edit in place": (lambda model: hl.edit(model, "2.weight:param", Tensor.zero_), torch.zeros_like),
    "an edit that looks": (lambda model: hl.edit(model, "2.weight:param", lambda w: None), lambda w: w),
}


@pytest.mark.parametrize("kind", VALUES)
def test_a_parameter_is_changed_for_a_block_and_its_gradients_go_to_the_real_one(kind: str) -> None:
    change, by_hand = VALUES[kind]
    model, x = mlp(), torch.randn(3, 4)
    before, plain, weight = state_of(model), model(x), model[2].weight.detach().clone()
    hidden = F.relu(model[0](x))
    expected = F.linear(hidden, by_hand(model[2].weight), model[2].bias)
    gradients = torch.autograd.grad(loss_of(expected), list(model.parameters()), allow_unused=True)
    with change(model):
        output = model(x)
        assert torch.equal(model.state_dict()["2.weight"], weight)
    assert torch.equal(output, expected)
    loss_of(output).backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        found = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        assert torch.allclose(found, torch.zeros_like(found) if gradient is None else gradient)
    model.zero_grad()
    assert state_of(model) == before, "the model changed, or a parameter was written to"
    assert torch.equal(model(x), plain)


def test_several_parameters_and_several_changes_of_one_act_in_order() -> None:
    model, x = mlp(), torch.randn(3, 4)
    hooks = hl.Hooks(model)
    hooks.patch({"2.weight:param": 1.0, "2.bias:param": 0.0})
    hooks.edit("2.weight:param", lambda w: w * 3, name="triple")
    acts = hooks.capture("2.weight:param")
    assert torch.equal(model(x), F.linear(F.relu(model[0](x)), torch.full((2, 8), 3.0)))
    assert acts["2.weight:param"].eq(3).all()
    hooks["triple"].deactivate()
    assert torch.equal(model(x), F.linear(F.relu(model[0](x)), torch.ones(2, 8)))
    hooks.remove()
    assert type(model[2]) is nn.Linear


def test_an_edit_acts_on_each_read_and_on_reads_from_outside() -> None:
    model, x = Autoencoder(), torch.randn(3, 4)
    seen = []

    def double(value: Tensor) -> Tensor:
        seen.append(tuple(value.shape))
        return value * 2

    plain = model.b_dec.detach().clone()
    with hl.edit(model, "b_dec:param", double), hl.capture(model, "b_dec:param", keep="all") as acts:
        output = model(x)
        assert seen == [(4,), (4,)]
    assert len(acts.calls("b_dec:param")) == 2
    assert torch.equal(output, with_weight(model, "b_dec", plain * 2)(x))
    with hl.patch(model, {"W_enc:param": 0.0}):
        assert torch.equal(model.encode(x), F.relu(model.b_enc).expand(3, 8))
    assert torch.equal(hl.run(model.encode, x, patch={"W_enc:param": 0.0}), F.relu(model.b_enc).expand(3, 8))


def test_tied_parameters_are_changed_under_every_name() -> None:
    model, ids = Shares(), torch.tensor([1, 2])
    new = torch.randn(6, 4)
    expected = 2 * F.linear(new[ids], new)
    for name in ("emb.weight", "head.weight"):
        assert torch.allclose(hl.run(model, ids, patch={f"{name}:param": new}), expected)
        assert model.emb.weight is model.head.weight
        with hl.capture(model, f"{name}:param", keep="all") as acts:
            model(ids)
        assert len(acts.calls(f"{name}:param")) == 3
    assert names(model, "**:param") == ["emb.weight:param"]


def test_wildcards_mean_parameters_and_not_buffers() -> None:
    model = GPT(depth=2)
    assert names(model, "**:param") == [f"{name}:param" for name, _ in model.named_parameters()]
    assert names(model, "h.*.mlp.*.weight:param") == [
        "h.0.mlp.0.weight:param", "h.0.mlp.2.weight:param", "h.1.mlp.0.weight:param", "h.1.mlp.2.weight:param",
    ]  # fmt: skip
    assert names(model, "h.{0}.attn.*:param[0]") == ["h.0.attn.weight:param[0]", "h.0.attn.bias:param[0]"]
    assert names(Autoencoder(), "*:param") == ["W_enc:param", "W_dec:param", "b_enc:param", "b_dec:param"]
    assert names(Autoencoder(), "W_*:param") == ["W_enc:param", "W_dec:param"]
    assert names(Autoencoder(), "scale:param") == ["scale:param"]
    x = tokens()
    _, acts = hl.run(model, x, capture="**:param")
    assert len(acts) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        assert torch.equal(acts[f"{name}:param"], parameter)
    expected = model(x) * 0
    assert torch.equal(hl.run(model, x, patch={"**:param": 0.0}), expected)


def test_a_parameter_that_is_not_read_is_an_error_when_named_and_a_warning_in_a_pattern() -> None:
    model, x = Autoencoder(), torch.randn(3, 4)
    model.dead = nn.Parameter(torch.ones(2))
    with pytest.raises(hl.NeverFired, match=says("not read by its name", "dead:param", 1)):
        hl.run(model, x, capture="dead:param")
    with pytest.raises(hl.NeverFired, match=says("not read by its name", "dead:param")):
        hl.run(model, x, patch={"dead:param": 0.0})
    with pytest.warns(hl.HooklineWarning, match=says("not read by its name", "dead:param")) as said:
        _, acts = hl.run(model, x, capture=["W_*:param", "d*:param"])
    assert len(said) == 1
    with pytest.raises(hl.NotCaptured, match="'dead:param'"):
        acts["dead:param"]


def test_buffers_that_the_forward_updates_are_updated_as_without_us() -> None:
    model, twin, x = nn.BatchNorm1d(4), nn.BatchNorm1d(4), torch.randn(5, 4)
    with hl.capture(model, "running_mean:param", "num_batches_tracked:param", keep="all") as acts:
        for _ in range(2):
            assert torch.equal(model(x), twin(x))
    assert torch.equal(model.running_mean, twin.running_mean)
    assert model.num_batches_tracked == 2
    assert acts.calls("running_mean:param")[0].count_nonzero() == 0, "the captured value was overwritten"
    assert type(model) is nn.BatchNorm1d


def test_a_patched_buffer_is_used_and_neither_the_real_one_nor_the_users_is_written() -> None:
    model, x = nn.BatchNorm1d(4), torch.randn(5, 4)
    mean = torch.full((4,), 3.0)
    model.eval()
    expected = F.batch_norm(x, mean, model.running_var, model.weight, model.bias)
    assert torch.equal(hl.run(model, x, patch={"running_mean:param": mean}), expected)
    model.train()
    with hl.patch(model, {"running_mean:param": mean}):
        model(x)
    assert mean.eq(3).all()
    assert model.running_mean.count_nonzero() == 0
    assert model.num_batches_tracked == 1


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "a number": (lambda model: hl.capture(model, "0.weight#1:param"), "'#'|#1|number"),
    "a number behind": (lambda model: hl.capture(model, "0.weight:param#1"), "'#'|#1|number"),
    "skip": (lambda model: hl.skip(model, "0.weight:param"), "skip"),
    "a module": (lambda model: hl.capture(model, "0:param"), r"'0.*(parameter|0\.weight)"),
    "a typing error": (
        lambda model: hl.capture(model, "0.wieght:param"),
        says("matches nothing did you mean", "0.weight"),
    ),
    "no module": (lambda model: hl.capture(model, "7.weight:param"), r"'7\.weight"),
    "no port": (lambda model: hl.capture(model, "0.weight"), r"0\.weight:param.*|0\.weight/"),
    "another port": (lambda model: hl.capture(model, "0.weight:input"), r"0\.weight"),
    "None": (lambda model: hl.capture(model, "3.bias:param"), r"'3\.bias.*None"),
    "nothing": (lambda model: hl.capture(model, "*.weights:param"), says("matches no did you mean")),
    "a member": (lambda model: hl.capture(model, "0/relu:param"), "param"),
    "a method": (lambda model: hl.capture(model, "0.extra_repr():param"), "param"),
    "a port of a type": (lambda model: hl.capture(model, (nn.Linear, ":param")), "param"),
    "a port of an object": (lambda model: hl.capture(model, (model[0], ":param")), "param"),
    "a site": (lambda model: hl.capture(model, hl.Site("0", "param")), "param"),
    "a site that is called": (lambda model: hl.capture(model, hl.Site("0.weight", "param", call=1)), "'#'|#1|number"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_parameter_is_refused_with_the_reason(what: str) -> None:
    ask, message = REFUSED[what]
    model = nn.Sequential(*mlp(), nn.Linear(2, 2, bias=False))
    before = state_of(model)
    with pytest.raises(hl.SiteError, match=message):
        ask(model)
    assert state_of(model) == before


def overwrite(value: Tensor) -> None:
    value.zero_()


MISFITS: dict[str, tuple[Callable[[nn.Module], hl.Hooks], str]] = {
    "shape": (lambda model: hl.patch(model, {"0.weight:param": torch.ones(3, 3)}), r"3, 3.*8, 4|8, 4.*3, 3"),
    "dtype": (lambda model: hl.patch(model, {"0.weight:param": torch.ones(8, 4).double()}), "float64.*float32|to\\("),
    "device": (lambda model: hl.patch(model, {"0.weight:param": torch.ones(8, 4, device="meta")}), "meta"),
    "edited shape": (lambda model: hl.edit(model, "0.weight:param", lambda w: w[:2]), "2, 4.*8, 4|8, 4.*2, 4"),
    "edited dtype": (lambda model: hl.edit(model, "0.weight:param", lambda w: w.double()), "float64"),
    "no tensor": (lambda model: hl.edit(model, "0.weight:param", lambda w: [1]), "list"),
    "no result": (
        lambda model: hl.edit(model, "0.weight:param", overwrite),
        "wrote into its argument but returned None",
    ),
}


@pytest.mark.parametrize("what", MISFITS)
def test_a_value_that_does_not_fit_is_refused_and_nothing_is_left_behind(what: str) -> None:
    change, message = MISFITS[what]
    model, x = mlp(), torch.randn(3, 4)
    before, plain = state_of(model), model(x)
    with pytest.raises(hl.EditError, match=rf"'0\.weight:param'.*({message})"), change(model):
        model(x)
    assert state_of(model) == before
    assert torch.equal(model(x), plain)


def test_an_attribute_error_in_an_edit_is_not_taken_for_a_missing_parameter() -> None:
    model, x = mlp(), torch.randn(3, 4)
    with pytest.raises((hl.HooklineError, AttributeError), match="no attribute 'wieght'"):
        hl.run(model, x, edit={"0.weight:param": lambda value: value.wieght})


def test_a_part_that_is_not_there_is_refused() -> None:
    with pytest.raises(hl.SiteError, match=says("dimension with size", "0.weight:param[9]")):
        hl.run(mlp(), torch.ones(2, 4), capture="0.weight:param[9]")


class Recomputed(Autoencoder):
    """Runs its forward twice."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("site", ["W_enc:param", "W_enc/matmul", "b_dec/add#0"])
@pytest.mark.parametrize("closed", [False, True])
def test_a_change_is_replayed_when_checkpointing_runs_the_forward_again(
    closed: bool, site: str, reentrant: bool
) -> None:
    model, x = Recomputed(), torch.randn(3, 4, requires_grad=True)
    model.reentrant = reentrant
    bare = Autoencoder()
    bare.load_state_dict(model.state_dict())
    with hl.edit(bare, site, lambda value: value * 3):
        expected = torch.autograd.grad(loss_of(bare(x)), [x, *bare.parameters()])
    with hl.edit(model, site, lambda value: value * 3), hl.capture(model, site, keep="all") as acts:
        loss = loss_of(model(x))
        if not closed:
            loss.backward()
    if closed:
        loss.backward()
    assert len(acts.calls(site)) == 1
    torch.testing.assert_close([x.grad, *(one.grad for one in model.parameters())], list(expected))
    assert type(model) is Recomputed


def test_what_is_set_on_a_parameter_inside_a_block_is_set_on_the_real_one() -> None:
    model, x = Autoencoder(), torch.randn(3, 4)
    with hl.capture(model, "W_enc/*", "W_dec:param"):
        model.W_enc.requires_grad_(False)
        model.W_dec.requires_grad = False
        model.W_enc.grad = torch.zeros(4, 8)
        model.b_dec.data = torch.zeros(4)
        model.W_enc.data = torch.zeros(4, 8)
        model(x)
    assert not model.W_enc.requires_grad
    assert not model.W_dec.requires_grad
    assert model.W_enc.grad.count_nonzero() == model.W_enc.count_nonzero() == model.b_dec.count_nonzero() == 0
    assert type(model.W_enc) is nn.Parameter


def test_autocast_uses_the_patched_parameter_and_not_a_cast_it_has_kept() -> None:
    model, x = mlp(), torch.randn(3, 4)
    new = torch.randn(8, 4)
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(x)
        patched = with_weight(model, "0.weight", new)(x)
        with hl.patch(model, {"0.weight:param": new}), hl.capture(model, "0.weight/linear", "0.weight:param") as acts:
            assert torch.equal(model(x), patched)
        assert torch.equal(model(x), plain)
    assert acts["0.weight/linear"].dtype == torch.bfloat16
    assert torch.equal(acts["0.weight:param"], new)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_parameters_are_seen_and_changed_in_inference_mode(mode: Callable[[], Any]) -> None:
    model, x = mlp(), torch.randn(3, 4)
    expected = with_weight(model, "0.weight", torch.ones(8, 4))(x)
    with mode():
        with hl.capture(model, "0.weight:param", "2.weight/*") as acts:
            plain = model(x)
        assert torch.equal(hl.run(model, x, patch={"0.weight:param": 1.0}), expected)
        assert torch.equal(hl.run(model, x, edit={"2.weight/*": lambda value: value * 2}), plain * 2)
    assert torch.equal(acts["2.weight/linear"], plain)
    (acts["0.weight:param"] * model[0].weight).sum().backward()


def test_functional_call_is_seen_with_the_parameters_it_is_given() -> None:
    model, x = Autoencoder(), torch.randn(3, 4)
    given = {name: torch.randn_like(one, requires_grad=True) for name, one in model.named_parameters()}
    expected = torch.func.functional_call(model, given, (x,))
    with hl.capture(model, "W_enc:param", "W_dec/matmul", "W_enc/*") as acts:
        output = torch.func.functional_call(model, given, (x,))
    assert torch.equal(output, expected)
    assert torch.equal(acts["W_enc:param"], given["W_enc"])
    assert torch.equal(acts["W_enc/matmul"], (x - given["b_dec"]) @ given["W_enc"])
    assert type(model) is Autoencoder
    with hl.edit(model, "W_enc:param", lambda value: value * 2):
        output = torch.func.functional_call(model, given, (x,))
    output.sum().backward()
    doubled = {**given, "W_enc": given["W_enc"] * 2}
    assert torch.equal(output, torch.func.functional_call(model, doubled, (x,)))
    assert given["W_enc"].grad is not None
    assert model.W_enc.grad is None


def test_attached_lists_reads_and_operations_and_clear_takes_them_away() -> None:
    model, x = Autoencoder(), torch.randn(3, 4)
    before, plain = state_of(model), model(x)
    hooks = hl.Hooks(model)
    hooks.patch({"W_enc:param": 0.0})
    hooks.capture("W_dec/matmul")
    hooks.edit("b_dec/*", F.relu)
    assert {(row.site, row.kind, row.owner) for row in hl.attached(model)} == {
        ("W_enc:param", "patch", "hookline"),
        ("W_dec/matmul", "capture", "hookline"),
        ("b_dec/*", "edit", "hookline"),
    }
    assert hl.clear(model) == 3
    assert len(hl.attached(model)) == 0
    assert state_of(model) == before
    assert torch.equal(model(x), plain)
    with hl.patch(model, {"W_enc:param": 0.0}):
        assert hl.clear(model) == 1
        assert torch.equal(model(x), plain)
    assert state_of(model) == before
