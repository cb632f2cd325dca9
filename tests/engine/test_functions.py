"""Functions as sites: the functions that a module's forward calls, by the names used in its source."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hookline as hl
from hookline._kernel import leaves, map_tensors
from tests.support.models import ORDER, Attention, AttentionBlock, Returns, Transformer, stages_of_attention, words
from tests.support.states import same, state_of


def zeroed(value: Any) -> Any:
    return map_tensors(torch.zeros_like, value)


whole, yes = torch.arange(1, 10).view(3, 3), torch.eye(3, dtype=torch.bool)
FORMS: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "x @ y": ("matmul", lambda x: x @ x),
    "y.__rmatmul__(x)": ("matmul", lambda x: x.__rmatmul__(x)),
    "x + 1": ("add", lambda x: x + 1),
    "1 + x": ("add", lambda x: 1 + x),
    "x - 1": ("sub", lambda x: x - 1),
    "1 - x": ("sub", lambda x: 1 - x),
    "x * 2": ("mul", lambda x: x * 2),
    "2 * x": ("mul", lambda x: 2 * x),
    "x / 2": ("div", lambda x: x / 2),
    "2 / x": ("div", lambda x: 2 / x),
    "x // 2": ("floor_divide", lambda x: x // 2),
    "2 // x": ("floor_divide", lambda x: 2 // x),
    "x % 2": ("remainder", lambda x: x % 2),
    "2 % x": ("remainder", lambda x: 2 % x),
    "x ** 2": ("pow", lambda x: x**2),
    "2 ** x": ("pow", lambda x: 2**x),
    "-x": ("neg", lambda x: -x),
    "+x": ("positive", lambda x: +x),
    "abs(x)": ("abs", lambda x: abs(x)),
    "x == y": ("eq", lambda x: x == x),
    "x != y": ("ne", lambda x: x != 1),
    "x < 1": ("lt", lambda x: x < 1),
    "1 < x": ("gt", lambda x: 1 < x),  # noqa: SIM300
    "x <= 1": ("le", lambda x: x <= 1),
    "x >= 1": ("ge", lambda x: x >= 1),
    "b & b": ("bitwise_and", lambda x: yes & yes),
    "b | b": ("bitwise_or", lambda x: yes | yes),
    "True ^ b": ("bitwise_xor", lambda x: True ^ yes),
    "~b": ("bitwise_not", lambda x: ~yes),
    "n << 1": ("bitwise_left_shift", lambda x: whole << 1),
    "2 << n": ("bitwise_left_shift", lambda x: 2 << whole),
    "n >> 1": ("bitwise_right_shift", lambda x: whole >> 1),
    "x += 1": ("add_", lambda x: operator.iadd(x.clone(), 1)),
    "x -= 1": ("sub_", lambda x: operator.isub(x.clone(), 1)),
    "x *= 2": ("mul_", lambda x: operator.imul(x.clone(), 2)),
    "x /= 2": ("div_", lambda x: operator.itruediv(x.clone(), 2)),
    "x //= 2": ("floor_divide_", lambda x: operator.ifloordiv(x.clone(), 2)),
    "x %= 2": ("remainder_", lambda x: operator.imod(x.clone(), 2)),
    "x **= 2": ("pow_", lambda x: operator.ipow(x.clone(), 2)),
    "b &= b": ("bitwise_and_", lambda x: operator.iand(yes.clone(), yes)),
    "x[0]": ("getitem", lambda x: x[0]),
    "x[mask]": ("getitem", lambda x: x[yes]),
    "x.T": ("T", lambda x: x.T),
    "x.mT": ("mT", lambda x: x.mT),
    "x.real": ("real", lambda x: x.real),
    "x.data": ("data", lambda x: x.data),
    "x.softmax(-1)": ("softmax", lambda x: x.softmax(-1)),
    "torch.softmax": ("softmax", lambda x: torch.softmax(x, -1)),
    "F.softmax": ("softmax", lambda x: F.softmax(x, dim=-1)),
    "torch.special.softmax": ("softmax", lambda x: torch.special.softmax(x, -1)),
    "torch.ops.aten.softmax.int": ("softmax", lambda x: torch.ops.aten.softmax.int(x, -1)),
    "torch.ops.aten.relu": ("relu", lambda x: torch.ops.aten.relu(x)),
    "torch.ops.aten.relu.default": ("relu", lambda x: torch.ops.aten.relu.default(x)),
    "torch.fft.fft": ("fft", lambda x: torch.fft.fft(x)),
    "torch.linalg.norm": ("norm", lambda x: torch.linalg.norm(x)),
    "x.norm()": ("norm", lambda x: x.norm()),
    "torch.linalg.svd": ("svd", lambda x: torch.linalg.svd(x)),
    "torch.special.expit": ("expit", lambda x: torch.special.expit(x)),
    "F.linear": ("linear", lambda x: F.linear(x, x)),
    "F.gelu": ("gelu", lambda x: F.gelu(x)),
    "F.layer_norm": ("layer_norm", lambda x: F.layer_norm(x, (3,))),
    "F.max_pool1d": ("max_pool1d", lambda x: F.max_pool1d(x, 3)),
    "F.embedding": ("embedding", lambda x: F.embedding(whole[0, :2] - 1, x)),
    "F.scaled_dot_product_attention": (
        "scaled_dot_product_attention",
        lambda x: F.scaled_dot_product_attention(x, x, x),
    ),
    "torch.relu_": ("relu_", lambda x: torch.relu_(x.clone())),
    "F.relu_": ("relu_", lambda x: F.relu_(x.clone())),
    "x.relu_()": ("relu_", lambda x: x.clone().relu_()),
    "F.relu(x, inplace=True)": ("relu", lambda x: F.relu(x.clone(), inplace=True)),
    "torch.einsum": ("einsum", lambda x: torch.einsum("ij,jk->ik", x, x)),
    "torch.cat": ("cat", lambda x: torch.cat([x, x])),
    "torch.where": ("where", lambda x: torch.where(yes, x, 0)),
    "torch.add(out=)": ("add", lambda x: torch.add(x, 1, out=torch.empty(3, 3))),
    "x.max(0)": ("max", lambda x: x.max(0)),
    "x.split(1)": ("split", lambda x: x.split(1)),
    "x.to(dtype)": ("to", lambda x: x.to(torch.float64)),
    "torch.ones": ("ones", lambda x: torch.ones(3)),
    "torch.ones_like": ("ones_like", lambda x: torch.ones_like(x)),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_function_is_captured_and_edited_by_the_name_it_is_written_with(form: str) -> None:
    name, function = FORMS[form]
    model, x = Returns(function), torch.rand(3, 3) + 0.5
    expected = function(x)
    output, acts = hl.run(model, x, capture=f"/{name}")
    assert list(acts) == [f"/{name}"]
    assert same(acts[f"/{name}"], expected)
    assert same(output, expected)
    assert same(hl.run(model, x, edit={f"/{name}": zeroed}), zeroed(expected))
    assert same(model(x), expected)


def test_every_function_of_a_forward_is_seen_in_order_and_equals_the_same_by_hand() -> None:
    model, x = Transformer(), words()
    plain, before = model(x), state_of(model)
    with hl.capture(model, "h.0.attn/*") as acts:
        output = model(x)
    assert torch.equal(output, plain)
    assert state_of(model) == before
    assert list(acts) == [f"h.0.attn/{name}" for name in ORDER]
    for name, value in stages_of_attention(model.h[0].attn, x).items():
        if name:
            torch.testing.assert_close(acts[f"h.0.attn/{name}"], value, msg=name)


def test_everything_in_every_module_is_captured_and_the_output_stays_bit_identical() -> None:
    model, x = Transformer(), words()
    with hl.capture(model, "/*", "**/*") as acts:
        output = model(x)
    assert torch.equal(output, model(x))
    assert torch.equal(acts["/mean#0"], output)
    inside = ["attn.qkv/linear#0", *(f"attn/{name}" for name in ORDER), "attn.out/linear#0"]
    expected = ["add#0", "mlp/linear#0", "gelu#0", "add#1"]
    found = [site.removeprefix("h.1") for site in acts if site.startswith("h.1")]
    assert sorted(found) == sorted([*(f".{name}" for name in inside), "/add#0", ".mlp/linear#0", "/gelu#0", "/add#1"])
    assert [name.removeprefix("/") for name in found if "attn" not in name] == [
        name if "/" not in name else f".{name}" for name in expected
    ]


PORTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "/softmax:input": lambda x, y: x,
    '/softmax:inputs["input"]': lambda x, y: x,
    '/softmax:inputs["dim"]': lambda x, y: 1,
    "/softmax:output": lambda x, y: torch.softmax(x, 1),
    "/softmax[:, 0]": lambda x, y: torch.softmax(x, 1)[:, 0],
    "/softmax:input[..., -1]": lambda x, y: x[..., -1],
    "/matmul:input": lambda x, y: x,
    '/matmul:inputs["other"]': lambda x, y: y,
    "/linear:input": lambda x, y: x,
    '/linear:inputs["weight"]': lambda x, y: y,
    '/scaled_dot_product_attention:inputs["attn_mask"]': lambda x, y: yes,
    '/scaled_dot_product_attention:inputs["value"][0]': lambda x, y: y[0],
    '/masked_fill:inputs["mask"]': lambda x, y: yes,
    '/masked_fill:inputs["value"]': lambda x, y: 0.0,
    "/cat:input[1]": lambda x, y: y,
    '/cat:inputs["tensors"][0]': lambda x, y: x,
    '/addmm:inputs["mat2"]': lambda x, y: y,
    "/max[0]": lambda x, y: x.max(0)[0],
    '/max["indices"]': lambda x, y: x.max(0).indices,
}


@pytest.mark.parametrize("site", PORTS)
@pytest.mark.parametrize("form", ["functions", "methods"])
def test_arguments_and_results_have_ports_by_torchs_own_names(site: str, form: str) -> None:
    x, y = torch.randn(3, 3), torch.randn(3, 3)

    def functions() -> None:
        F.softmax(x, dim=1), torch.matmul(input=x, other=y), F.linear(x, weight=y), torch.masked_fill(x, yes, 0.0)
        F.scaled_dot_product_attention(x, x, y, yes), torch.cat([x, y]), torch.addmm(x, x, y), torch.max(x, 0)

    def methods() -> None:
        x.softmax(1), x @ y, x.masked_fill(yes, 0.0), x.addmm(x, y), x.max(dim=0)
        torch.cat(dim=0, tensors=[x, y]), torch._C._nn.linear(x, y)
        F.scaled_dot_product_attention(x, key=x, value=y, attn_mask=yes)

    _, acts = hl.run(Returns({"functions": functions, "methods": methods}[form]), capture=site)
    assert list(acts) == [site.removesuffix(":output")]
    expected, found = PORTS[site](x, y), acts[site]
    assert same(found, expected) if isinstance(expected, Tensor) else found == expected


NAMES: dict[str, tuple[Callable[[Tensor], Any], list[str]]] = {
    "mean": (lambda x: x.mean((0, 1)), ["input", "dim"]),
    "sum": (lambda x: x.sum(-1, keepdim=True), ["input", "dim", "keepdim"]),
    "to": (lambda x: x.to(torch.float64), ["input", "dtype"]),
    "pow": (lambda x: x**2, ["input", "exponent"]),
    "where": (lambda x: torch.where(x > 0, x, 0.0), ["condition", "input", "other"]),
    "einsum": (lambda x: torch.einsum("ij,jk->ik", x, x), ["equation", "operands"]),
    "transpose": (lambda x: x.transpose(0, 1), ["input", "dim0", "dim1"]),
    "setitem": (lambda x: x.clone().__setitem__(0, 1.0), ["input", "index", "value"]),
    "relu": (lambda x: torch.ops.aten.relu(x), ["input"]),
    "split": (lambda x: x.split(1), ["input", "split_size", "dim"]),
    "sub": (lambda x: 1 - x, ["input", "other"]),
}


@pytest.mark.parametrize("name", NAMES)
def test_all_arguments_are_named_as_in_the_overload_that_was_called(name: str) -> None:
    function, expected = NAMES[name]
    _, acts = hl.run(Returns(function), torch.rand(3, 3), capture=f"/{name}:inputs")
    assert list(acts[f"/{name}:inputs"]) == expected


def test_arguments_of_a_function_are_patched_and_edited() -> None:
    model, x, y = Returns(lambda x, y: F.softmax(x @ y, dim=-1)), torch.randn(3, 3), torch.randn(3, 3)
    run = hl.run
    assert torch.equal(run(model, x, y, patch={'/softmax:inputs["dim"]': 0}), torch.softmax(x @ y, 0))
    assert torch.equal(run(model, x, y, patch={"/softmax:input": 0.0}), torch.full((3, 3), 1 / 3))
    assert torch.equal(run(model, x, y, patch={'/matmul:inputs["other"]': x}), torch.softmax(x @ x, -1))
    assert torch.equal(run(model, x, y, edit={"/matmul:input": lambda value: value * 2}), model(x * 2, y))
    expected = torch.softmax(x @ y, -1)
    expected[:, 0] = 7
    assert torch.equal(run(model, x, y, patch={"/softmax[:, 0]": 7.0}), expected)
    masked = Returns(lambda x: F.scaled_dot_product_attention(x, x, x, None))
    output = run(masked, x, patch={'/scaled_dot_product_attention:inputs["attn_mask"]': yes})
    assert torch.equal(output, F.scaled_dot_product_attention(x, x, x, yes))
    doubled = Returns(lambda x: x * 2)
    assert torch.equal(run(doubled, x, edit={"/mul:inputs": lambda given: {**given, "other": y}}), x * y)
    both = run(model, x, y, edit={'/matmul:inputs["other"][0]': torch.neg, "/matmul": torch.exp})
    assert torch.equal(both, torch.softmax(torch.exp(x @ torch.cat([-y[:1], y[1:]])), -1))


def test_a_star_among_subscripts_makes_a_site_of_each_head() -> None:
    model, x = Transformer(), words()
    _, acts = hl.run(model, x, capture=["h.0.attn/softmax[:, *]", "h.0.attn/softmax"])
    assert [site for site in acts if "[" in site] == [f"h.0.attn/softmax[:, {head}]" for head in (0, 1)]
    assert torch.equal(acts["h.0.attn/softmax[:, 1]"], acts["h.0.attn/softmax"][:, 1])


class Repeats(nn.Module):
    """Calls one module several times; each call multiplies matrices twice."""

    def __init__(self) -> None:
        super().__init__()
        self.step = Returns(lambda x: (x @ x) @ torch.eye(2) * 0.5)

    def forward(self, x: Tensor, times: int = 3) -> Tensor:
        for _ in range(times):
            x = self.step(x)
        return x


def test_a_number_counts_the_calls_of_a_name_within_one_call_of_the_module() -> None:
    model, x = Repeats(), torch.randn(2, 2)
    inputs = [x, model.step(x), model.step(model.step(x))]
    sites = ["step/matmul#1", "step#2/matmul#0", "step#1/matmul", "step/matmul", "step#2/m*"]
    with hl.capture(model, *sites, keep="all") as acts:
        model(x)
    products = [one @ one for one in inputs]
    assert same(acts.calls("step/matmul#1"), products)  # The second product is by the identity.
    assert same(acts.calls("step#2/matmul#0"), products[2:])
    assert same(acts.calls("step#1/matmul"), [products[1], products[1]])
    assert same(acts.calls("step/matmul"), [one for one in products for _ in range(2)])
    assert [site for site in acts if site.startswith("step#2/m")] == [
        "step#2/matmul#0", "step#2/matmul#1", "step#2/mul#0",
    ]  # fmt: skip
    with hl.patch(model, {"step#2/matmul#1": 0.0}), hl.capture(model, "step", keep="all") as steps:
        assert model(x).count_nonzero() == 0
        assert steps["step"].count_nonzero() == 0
        assert steps.calls("step")[1].count_nonzero() == 4


def test_a_function_that_runs_several_times_in_one_forward_warns_unless_all_are_kept() -> None:
    model, x = Repeats(), torch.randn(2, 2)
    with pytest.warns(hl.HooklineWarning, match=r"'step/mul'.*keep=.all.*#n"), hl.capture(model, "step/mul") as acts:
        model(x)
        latest = acts["step/mul"]
    assert torch.equal(latest, model(x))


def test_wildcards_and_braces_choose_names_and_a_cache_answers_without_the_number_where_there_is_one() -> None:
    model, x = Transformer(), words()
    with hl.capture(model, "h.*.attn/{softmax,matmul}") as acts:
        model(x)
    inside = ["matmul#0", "softmax#0", "matmul#1"]
    assert list(acts) == [f"h.{layer}.attn/{name}" for layer in (0, 1) for name in inside]
    assert torch.equal(acts["h.1.attn/softmax"], acts["h.1.attn/softmax#0"])
    assert "h.1.attn/softmax" in acts
    with pytest.raises(hl.NotCaptured, match=r"matmul#0.*matmul#1"):
        acts["h.1.attn/matmul"]
    assert list(hl.run(model, x, capture="h.0.attn/*oft*")[1]) == ["h.0.attn/softmax#0"]
    assert list(hl.run(model, x, capture="h.0.attn/mat*#1")[1]) == ["h.0.attn/matmul#1"]
    first, second = hl.run(model, x, capture="h.*.attn/softmax")[1].values()
    assert same([first, second], [acts[f"h.{layer}.attn/softmax"] for layer in (0, 1)])
    assert torch.equal(hl.run(model, x, patch=acts), model(x))


def test_a_wildcard_means_what_gives_a_tensor_and_nothing_that_only_tells_of_one() -> None:
    def forward(x: Tensor) -> Tensor:
        with torch.no_grad():
            size = x.shape[0] if x.dim() and x.is_contiguous() and x.dtype else x.size(0)
        return x.T.reshape(size, -1) * float(x.sum())

    model, x = Returns(forward), torch.randn(3, 3)
    names = ["T", "reshape", "sum", "mul"]
    for port in ("", ":input", ":inputs"):
        assert list(hl.run(model, x, capture=f"/*{port}")[1]) == [f"/{name}#0{port}" for name in names]


def test_edits_know_the_function_they_are_at() -> None:
    model, x = Transformer(), words()
    seen: list[tuple[str, type, int]] = []

    def note(value: Any, call: Any) -> None:
        seen.append((str(call.site), type(call.module), len(leaves(call.args))))

    with hl.edit(model, "h.1.attn/softmax", note, with_call=True), hl.edit(model, "h.0/*", note, with_call=True):
        model(x)
    assert seen == [
        ("h.0/add#0", AttentionBlock, 2), ("h.0/gelu#0", AttentionBlock, 1), ("h.0/add#1", AttentionBlock, 2),
        ("h.1.attn/softmax", Attention, 1),
    ]  # fmt: skip
