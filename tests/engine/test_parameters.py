"""Parameters and buffers as sites: `W_enc/matmul` and `W_enc/*` are results of operations that take `W_enc`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import Autoencoder, Shares, Uses, loss_of
from tests.support.states import state_of


def names(model: nn.Module, *where: Any, **options: Any) -> list[str]:
    return [str(site) for site in hl.sites(model, *where, **options)]


def test_the_results_of_operations_on_bare_parameters_are_seen() -> None:
    model, x = Autoencoder(), torch.randn(3, 4)
    before, plain = state_of(model), model(x)
    with hl.capture(model, "W_enc/matmul", "b_enc/add", "b_dec/*", "scale/mul", "W_dec/matmul[:, 0]") as acts:
        assert torch.equal(model(x), plain)
    centred = x - model.b_dec
    assert list(acts) == [
        "b_dec/sub#0", "W_enc/matmul", "b_enc/add", "W_dec/matmul[:, 0]", "scale/mul", "b_dec/add#0",
    ]  # fmt: skip
    assert torch.equal(acts["b_dec/sub#0"], centred)
    assert torch.equal(acts["b_dec/sub"], centred), "the number may be left out if the operation runs once"
    assert torch.equal(acts["W_enc/matmul"], centred @ model.W_enc)
    assert torch.equal(acts["b_enc/add"], centred @ model.W_enc + model.b_enc)
    assert torch.equal(acts["W_dec/matmul[:, 0]"], (model.encode(x) @ model.W_dec)[:, 0])
    assert torch.equal(acts["scale/mul"], model.encode(x) @ model.W_dec * 2)
    assert torch.equal(acts["b_dec/add#0"], plain)
    assert state_of(model) == before


IDS = torch.tensor([2, 0, 2])
USES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "x @ W": (lambda w, x: x @ w, "matmul"),
    "W @ x": (lambda w, x: w @ x, "matmul"),
    "torch.matmul": (lambda w, x: torch.matmul(x, w), "matmul"),
    "x.matmul": (lambda w, x: x.matmul(w), "matmul"),
    "keyword": (lambda w, x: torch.matmul(x, other=w), "matmul"),
    "mm": (lambda w, x: x.mm(w), "mm"),
    "linear": (lambda w, x: F.linear(x, w), "linear"),
    "addmm": (lambda w, x: torch.addmm(x, x, w), "addmm"),
    "addmm first": (lambda w, x: torch.addmm(w, x, x), "addmm"),
    "einsum": (lambda w, x: torch.einsum("ij,jk->ik", x, w), "einsum"),
    "einsum list": (lambda w, x: torch.einsum("ij,jk->ik", [x, w]), "einsum"),
    "cat": (lambda w, x: torch.cat([x, w]), "cat"),
    "stack": (lambda w, x: torch.stack((w, x)), "stack"),
    "W * 2": (lambda w, x: w * 2, "mul"),
    "2 * W": (lambda w, x: 2 * w, "mul"),
    "1 - W": (lambda w, x: 1 - w, "sub"),
    "x - W": (lambda w, x: x - w, "sub"),
    "x / W": (lambda w, x: x / w, "div"),
    "-W": (lambda w, x: -w, "neg"),
    "W ** 2": (lambda w, x: w**2, "pow"),
    "exp": (lambda w, x: w.exp(), "exp"),
    "norm": (lambda w, x: w.norm(dim=-1), "norm"),
    "softmax": (lambda w, x: F.softmax(w, -1), "softmax"),
    "where": (lambda w, x: torch.where(x > 0, x, w), "where"),
    "rows by a tensor": (lambda w, x: w[IDS], "getitem"),
    "rows by a mask": (lambda w, x: w[x[:, 0] > -9], "getitem"),
    "index_select": (lambda w, x: w.index_select(0, IDS), "index_select"),
    "embedding": (lambda w, x: F.embedding(IDS, w), "embedding"),
    "layer_norm": (lambda w, x: F.layer_norm(x, (4,), w[0]), "layer_norm"),
    "conv1d": (lambda w, x: F.conv1d(x[None], w[..., None]), "conv1d"),
    "scaled": (lambda w, x: F.scaled_dot_product_attention(x, w, x), "scaled_dot_product_attention"),
    "+=": (lambda w, x: x.clone().add_(w), "add_"),
}


@pytest.mark.parametrize("use", USES)
def test_each_operation_that_takes_a_parameter_is_seen_under_its_own_name(use: str) -> None:
    function, name = USES[use]
    model, x = Uses(function), torch.randn(4, 4)
    before, plain = state_of(model), model(x)
    plain.sum().backward()
    expected, model.W.grad = model.W.grad, None
    with hl.capture(model, "W/*") as acts:
        output = model(x)
    assert type(output) is Tensor
    assert torch.equal(output, plain)
    assert list(acts) == [f"W/{name}#0"]
    assert torch.equal(acts[f"W/{name}"], plain)
    output.sum().backward()
    assert torch.equal(model.W.grad, expected)
    model.W.grad = None
    assert hl.run(model, x, patch={f"W/{name}": 0.0}).count_nonzero() == 0
    assert torch.equal(hl.run(model, x, edit={"W/*": lambda value: value * 2}), plain * 2)
    assert state_of(model) == before


FOLLOWED: dict[str, Callable[[Tensor], Tensor]] = {
    "T": lambda w: w.T,
    "mT": lambda w: w.mT,
    "t": lambda w: w.t(),
    "transpose": lambda w: torch.transpose(w, 0, 1),
    "permute": lambda w: w.permute(1, 0),
    "view": lambda w: w.view(2, 8).view(4, 4),
    "reshape": lambda w: w.reshape(16).reshape(4, 4),
    "flatten": lambda w: w.flatten().unflatten(0, (4, 4)),
    "to": lambda w: w.to(torch.float64).to(torch.float32),
    "double": lambda w: w.double().float(),
    "type_as": lambda w: w.type_as(torch.ones(1)),
    "a part": lambda w: w[..., :][:4],
    "a row": lambda w: w[0].expand(4, 4),
    "unsqueeze": lambda w: w[None].squeeze(0),
    "clone": lambda w: w.clone(),
    "contiguous": lambda w: w.T.contiguous(),
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "chunk": lambda w: w.chunk(2)[0].expand(2, 4),
    "unbind": lambda w: w.unbind()[1].expand(4, 4),
    "iteration": lambda w: next(iter(w)).expand(4, 4),
}


@pytest.mark.parametrize("how", FOLLOWED)
def test_views_casts_and_clones_are_followed_and_not_counted(how: str) -> None:
    model, x = Uses(lambda w, x: F.linear(x, FOLLOWED[how](w))), torch.randn(3, 4)
    plain = model(x)
    output, acts = hl.run(model, x, capture="W/*")
    assert list(acts) == ["W/linear#0"]
    assert torch.equal(output, plain)
    assert torch.equal(acts["W/linear#0"], plain)
    assert hl.run(model, x, patch={"W/linear": 0.0}).count_nonzero() == 0


def test_reading_its_shape_dtype_or_numbers_is_no_operation() -> None:
    def look(w: Tensor, x: Tensor) -> Tensor:
        assert (w.shape, w.size(), w.ndim, w.dim(), w.numel(), len(w)) == ((4, 4), (4, 4), 2, 2, 16, 4)
        assert (w.dtype, w.device.type, w.requires_grad, w.is_leaf) == (torch.float32, "cpu", True, True)
        assert w.stride() == (4, 1)
        assert w.is_contiguous()
        assert isinstance(w.tolist(), list)
        assert isinstance(w.data_ptr(), int)
        assert w.grad.shape == (4, 4)
        assert w.contiguous() is w
        assert w.to(torch.float32) is w
        assert w[0, 0].item() == w.tolist()[0][0]
        assert isinstance(w, nn.Parameter)
        return x @ w

    model, x = Uses(look), torch.randn(3, 4)
    model.W.grad = torch.zeros(4, 4)
    _, acts = hl.run(model, x, capture="W/*")
    assert list(acts) == ["W/matmul#0"]


def test_what_is_made_of_the_result_is_no_longer_an_operation_on_the_parameter() -> None:
    model, x = Uses(lambda w, x: ((x @ w).relu_() + 1) @ (w * 2).T), torch.randn(3, 4)
    _, acts = hl.run(model, x, capture="W/*")
    assert list(acts) == ["W/matmul#0", "W/mul#0"]
    assert torch.equal(acts["W/matmul"], x @ model.W), "the captured value was overwritten"


def test_numbers_count_the_operations_of_one_name_in_one_forward() -> None:
    model = Uses(lambda w, x: ((x @ w) @ w) @ w + w.sum())
    x = torch.randn(3, 4)
    with hl.capture(model, "W/*") as acts:
        for scale in (1.0, 2.0):
            model(x * scale)
    assert list(acts) == ["W/matmul#0", "W/matmul#1", "W/matmul#2", "W/sum#0"]
    assert torch.equal(acts["W/matmul#1"], x * 2 @ model.W @ model.W)
    with hl.patch(model, {"W/matmul#1": 0.0}), hl.capture(model, "W/matmul#2", "W/matmul", keep="all") as acts:
        outputs = [model(x), model(x)]
    assert all(torch.equal(output, model.W.sum().expand(3, 4)) for output in outputs)
    assert len(acts.calls("W/matmul#2")) == 2
    assert len(acts.calls("W/matmul")) == 6
    with pytest.raises(hl.NeverFired, match=says("did not fire counts", "W/matmul#3", "#", 0)):
        hl.run(model, x, capture="W/matmul#3")


def test_several_operations_of_one_name_warn_when_only_the_last_is_kept() -> None:
    model, x = Uses(lambda w, x: (x @ w) @ w), torch.randn(3, 4)
    _, acts = hl.run(model, x, capture="W/matmul")
    with pytest.warns(hl.HooklineWarning, match="'W/matmul'.*keep=.all.*#n"):
        assert torch.equal(acts["W/matmul"], x @ model.W @ model.W)


def test_a_part_is_patched_and_a_result_is_edited_in_place_of_the_real_one() -> None:
    model, x = Autoencoder(), torch.randn(3, 4)
    output, acts = hl.run(model, x, patch={"W_enc/matmul[:, 2:]": -1.0}, capture=["W_enc/matmul", "b_enc/add"])
    assert acts["W_enc/matmul"][:, 2:].eq(-1).all()
    assert torch.equal(acts["W_enc/matmul"][:, :2], ((x - model.b_dec) @ model.W_enc)[:, :2])
    assert torch.equal(output, model.decode(acts["b_enc/add"].relu()))
    with pytest.raises(hl.EditError, match=r"'W_enc/matmul'.*3, 8"):
        hl.run(model, x, edit={"W_enc/matmul": lambda value: value[:, :2]})


def test_an_operation_is_skipped_and_stopped_at() -> None:
    model, x = Uses(lambda w, x: (x @ w).relu()), torch.randn(3, 4)
    assert torch.equal(hl.run(model, x, skip="W/matmul"), x.relu())
    assert torch.equal(hl.run(model, x, skip={"W/matmul": torch.ones(3, 4)}), torch.ones(3, 4))
    model = Autoencoder()
    output, acts = hl.run(model, x, capture="W_enc/matmul", stop=True)
    assert output is None
    assert torch.equal(acts["W_enc/matmul"], (x - model.b_dec) @ model.W_enc)


def test_an_operation_on_two_parameters_is_seen_and_changed_under_both() -> None:
    class Both(Autoencoder):
        def encode(self, x: Tensor) -> Tensor:
            return torch.addmm(self.b_enc, x, self.W_enc)

    model, x = Both(), torch.randn(3, 4)
    with hl.edit(model, "W_enc/addmm", lambda value: value * 2), hl.edit(model, "b_enc/*", lambda value: value * 3):
        with hl.capture(model, "W_enc/*", "b_enc/*", "W_enc/addmm:inputs") as acts:
            model(x)
    assert torch.equal(acts["W_enc/addmm"], model.encode(x) * 6)
    assert torch.equal(acts["b_enc/addmm"], model.encode(x) * 6)
    assert all(type(value) in (Tensor, nn.Parameter) for value in acts["W_enc/addmm:inputs"].values())


def test_the_arguments_and_gradients_of_an_operation_are_sites_too() -> None:
    model, x = Autoencoder(), torch.randn(3, 4)
    hidden = (x - model.b_dec) @ model.W_enc
    loss = loss_of(model.decode(F.relu(hidden + model.b_enc)))
    expected, of_weight = torch.autograd.grad(loss, [hidden, model.W_enc])
    sites = ("W_enc/matmul:input", 'W_enc/matmul:inputs["other"]', "W_enc/matmul:grad_output", "W_enc/matmul:inputs")
    with hl.capture(model, *sites) as acts:
        loss_of(model(x)).backward()
    assert torch.equal(acts["W_enc/matmul:input"], x - model.b_dec)
    assert torch.equal(acts['W_enc/matmul:inputs["other"]'], model.W_enc)
    assert type(acts['W_enc/matmul:inputs["other"]']) in (Tensor, nn.Parameter)
    assert list(acts["W_enc/matmul:inputs"]) == ["input", "other"]
    torch.testing.assert_close(acts["W_enc/matmul:grad_output"], expected)
    assert torch.equal(model.W_enc.grad, of_weight)
    model.zero_grad()
    with hl.edit(model, "W_enc/matmul:grad_output", lambda gradient: gradient * 0):
        loss_of(model(x)).backward()
    assert model.W_enc.grad.count_nonzero() == 0
    assert model.W_dec.grad.count_nonzero() > 0
    assert torch.equal(
        hl.run(model, x, edit={"W_enc/matmul:input": torch.zeros_like}), model.decode(F.relu(model.b_enc)).expand(3, 4)
    )


def test_a_value_of_the_graph_itself_has_its_gradient() -> None:
    model, x = Autoencoder(), torch.randn(3, 4)
    with hl.capture(model, "W_enc/matmul", detach=False) as acts:
        loss = loss_of(model(x))
    assert torch.autograd.grad(loss, acts["W_enc/matmul"])[0].shape == (3, 8)


def test_a_parameter_is_followed_through_all_modules_that_use_it_and_under_every_name() -> None:
    model, ids = Shares(), torch.tensor([1, 2])
    plain = model(ids)
    for name in ("emb.weight", "head.weight"):
        output, acts = hl.run(model, ids, capture=f"{name}/*")
        assert torch.equal(output, plain)
        assert list(acts) == [f"{name}/embedding#0", f"{name}/linear#0", f"{name}/linear#1"]
        assert torch.equal(acts[f"{name}/linear#1"], F.linear(model.emb(ids), model.emb.weight))
        assert hl.run(model, ids, patch={f"{name}/embedding": 0.0}).count_nonzero() == 0


def test_parameters_in_lists_and_dicts_and_of_children_are_sites() -> None:
    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ws = nn.ParameterList([torch.randn(4, 4), torch.randn(4, 4)])
            self.by = nn.ParameterDict({"left": torch.randn(4, 4), "right": torch.randn(4, 4)})
            self.child = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            for weight in self.ws:
                x = x @ weight
            return self.child(x @ self.by["left"] @ self.by.right)

    model, x = Lists(), torch.randn(3, 4)
    before, plain = state_of(model), model(x)
    sites = ["ws.0/matmul", "ws.1/matmul", "by.left/matmul", "by.right/matmul", "child.weight/linear"]
    output, acts = hl.run(model, x, capture=sites)
    assert torch.equal(output, plain)
    assert list(acts) == sites
    assert torch.equal(acts["ws.1/matmul"], x @ model.ws[0] @ model.ws[1])
    assert hl.run(model, x, patch={"ws.1/matmul": 0.0}).equal(model.child(torch.zeros(3, 4)))
    assert len(hl.run(model, x, capture=["ws.*/*", "by.*/matmul", "child.bias/*"])[1]) == 5
    assert state_of(model) == before


def test_an_operation_is_seen_in_a_method_that_is_called_without_a_forward() -> None:
    model, x = Autoencoder(), torch.randn(3, 4)
    with hl.capture(model, "W_enc/matmul", "b_dec/*") as acts:
        features = model.encode(x)
    assert torch.equal(features, F.relu(acts["W_enc/matmul"] + model.b_enc))
    assert "b_dec/sub#0" in acts
    output, acts = hl.run(model.decode, features, capture="W_dec/matmul")
    assert torch.equal(acts["W_dec/matmul"], features @ model.W_dec)
    assert hl.run(model.encode, x, patch={"W_enc/matmul": -1.0}).count_nonzero() == 0
    assert torch.equal(output, model.decode(features))


def test_wildcards_in_the_operation_and_in_the_path() -> None:
    model, x = Autoencoder(), torch.randn(3, 4)
    _, acts = hl.run(model, x, capture=["W_*/mat*", "b_dec/{sub,add}"])
    assert list(acts) == ["b_dec/sub#0", "W_enc/matmul#0", "W_dec/matmul#0", "b_dec/add#0"]
    with pytest.raises(hl.SiteError, match=says("matches nothing did you mean", "V_enc", "W_enc")):
        hl.capture(model, "V_enc/matmul")
    with pytest.raises(hl.NeverFired, match=says("did not fire did not", "b_dec/mm", "mm")):
        hl.run(model, x, capture="b_dec/mm")
    with pytest.raises(hl.NeverFired, match=says("did not fire did", "W_enc/matmull", "matmul")):
        hl.run(model, x, patch={"W_enc/matmull": 0.0})
    assert names(model, "W_enc/*", "W_dec/matmul", run=(x,)) == ["W_enc/matmul", "W_dec/matmul"]


def test_training_goes_on_bit_for_bit_and_optimizers_keep_their_parameters() -> None:
    model = Autoencoder()
    twin = copy.deepcopy(model)
    x = torch.randn(3, 4)

    def train(one: Autoencoder) -> list[Tensor]:
        optimizer = torch.optim.Adam(one.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(one(x)).backward()
            optimizer.step()
        return [parameter.detach() for parameter in one.parameters()]

    with hl.capture(model, "W_*/*", "b_*/*", "W_enc/matmul:grad_output", "scale/mul"):
        watched = train(model)
    assert all(torch.equal(*pair) for pair in zip(watched, train(twin), strict=True))
    hooks = hl.Hooks(model)
    hooks.capture("W_enc/*")
    train(model)
    hooks.remove()
    assert type(model) is Autoencoder
