"""Values of every kind are captured bit for bit as they passed, even if they are overwritten later."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.masked import masked_tensor

import hookline as hl
from tests.errors.wording import says
from tests.support.models import Overwrites, Pair, Result, Returns
from tests.support.states import bits


class Slotted:
    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_an_activation_in_place_leaves_the_captured_value_alone() -> None:
    """C01"""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    x = torch.randn(3, 4)
    with hl.capture(model, "0", "1:input") as acts:
        model(x)
    assert acts["0"].equal(nn.functional.linear(x, model[0].weight, model[0].bias))
    assert acts["1:input"].equal(acts["0"])
    assert acts["0"].min() < 0


@pytest.mark.parametrize("clone", [None, True])
@pytest.mark.parametrize(
    "write",
    [
        lambda y: y.add_(1),
        lambda y: torch.mul(y, 2, out=y),
        lambda y: y.data.zero_(),
        lambda y: y.numpy().fill(0),
        lambda y: y[0].zero_(),
        lambda y: y.view(-1).t().zero_(),
        lambda y: torch._foreach_zero_([y]),
    ],
    ids=["add_", "out=", ".data", "numpy", "part", "view", "foreach"],
)
def test_whatever_overwrites_a_value_later_does_not_reach_the_capture(
    write: Callable[[Any], Any], clone: bool | None
) -> None:
    """C02"""
    model = Overwrites(lambda x: x * 2, write)
    x = torch.ones(2, 3)
    with hl.capture(model, "source", clone=clone) as acts:
        assert not model(x).equal(x * 2)
    assert acts["source"].equal(x * 2)


def test_a_module_that_returns_the_same_buffer_each_time_gives_every_call_its_own_value() -> None:
    """C02"""
    buffer = torch.empty(2)
    model = Returns(lambda x: torch.mul(x, 10, out=buffer))
    with hl.capture(model, "", keep="all") as acts:
        for number in range(3):
            model(torch.full((2,), float(number)))
    assert [value[0].item() for value in acts.calls("")] == [0.0, 10.0, 20.0]


def test_a_reference_that_was_overwritten_is_refused_when_read() -> None:
    """C01, C02"""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    with hl.capture(model, "0", clone=False) as acts:
        model(torch.randn(3, 4))
    with pytest.raises(hl.StaleValue, match=says("was overwritten in place", "0")):
        acts["0"]


def test_a_captured_part_neither_holds_the_whole_nor_changes_with_it() -> None:
    """C03"""
    model = Overwrites(lambda x: x * 2, Tensor.zero_)
    with hl.capture(model, "source[:, -1]") as acts:
        model(torch.ones(2, 1000))
    assert acts["source[:, -1]"].tolist() == [2.0, 2.0]
    assert acts["source[:, -1]"].untyped_storage().nbytes() == 8
    assert "8 bytes" in repr(acts)


def test_an_input_is_captured_as_it_entered() -> None:
    """C04"""
    model = Returns(lambda x: x.mul_(3))
    with hl.capture(model, ":input", "") as acts:
        model(torch.ones(2))
    assert acts[":input"].tolist() == [1.0, 1.0]
    assert acts[""].tolist() == [3.0, 3.0]


def test_an_input_is_captured_as_the_forward_gets_it_whenever_a_pre_hook_was_registered() -> None:
    """C04"""
    model = nn.Sequential(nn.Identity())
    with hl.capture(model, "0:input") as acts:
        handle = model[0].register_forward_pre_hook(lambda module, args: (args[0] + 5,))
        model(torch.zeros(2))
        handle.remove()
    assert acts["0:input"].tolist() == [5.0, 5.0]


CONTAINERS: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda x: (x * 1, (x * 2, "text", None)),
    "list": lambda x: [x * 1, [x * 2]],
    "dict": lambda x: {"a": x * 1, 3: {"b": x * 2}},
    "OrderedDict": lambda x: OrderedDict(b=x * 1, a=x * 2),
    "namedtuple": lambda x: Pair(x * 1, [x * 2]),
    "return type": lambda x: torch.max(x, 0),
    "dataclass": lambda x: Result(x * 1, (x * 2,)),
    "deque": lambda x: deque([x * 1, x * 2]),
    "read-only mapping": lambda x: MappingProxyType({"a": x * 1}),
    "slots": lambda x: Slotted(x * 1),
    "distribution": lambda x: torch.distributions.Normal(x * 1, torch.ones_like(x)),
}


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a value, found without hookline's code."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (str, int, type(None))):
        return []
    if hasattr(value, "values") and callable(value.values):
        value = list(value.values())
    if isinstance(value, (tuple, list, deque)):
        return [tensor for part in value for tensor in tensors_in(part)]
    if isinstance(value, Slotted):
        return [value.tensor]
    return [tensor for part in vars(value).values() for tensor in tensors_in(part)]


@pytest.mark.parametrize("kind", CONTAINERS)
def test_every_tensor_of_a_nested_value_is_captured_in_its_own_type_and_none_is_shared(kind: str) -> None:
    """C05"""
    make, x = CONTAINERS[kind], torch.ones(2, 2)
    model = Overwrites(make, lambda value: [tensor.zero_() for tensor in tensors_in(value)])
    with hl.capture(model, "source") as acts:
        output = model(x)
    expected = make(x)
    assert type(acts["source"]) is type(output)
    kept = tensors_in(acts["source"])
    assert len(kept) == len(tensors_in(expected)) > 0
    assert all(one.equal(other) for one, other in zip(kept, tensors_in(expected), strict=True))


def test_a_container_that_cannot_be_rebuilt_is_refused_by_name() -> None:
    """C05"""
    model = Returns(lambda x: {x})
    with hl.capture(model, ""), pytest.raises(hl.HooklineError, match="set"):
        model(torch.ones(2))


def test_a_value_without_tensors_is_kept_as_it_is() -> None:
    """C05"""
    model = Returns(lambda x: (None, "text", 3))
    _, acts = hl.run(model, torch.ones(2), capture="")
    assert acts[""] == (None, "text", 3)


class Attention(nn.Module):
    def forward(self, hidden: Tensor, mask: Tensor | None = None, *rest: Tensor, scale: float = 1.0) -> Tensor:
        return hidden * scale


@pytest.mark.parametrize("positional", [0, 1, 2])
def test_arguments_are_found_by_name_however_they_were_passed(positional: int) -> None:
    """C09"""
    model, hidden, mask = Attention(), torch.ones(2), torch.zeros(2)
    args = (hidden, mask)[:positional]
    kwargs = dict(list({"hidden": hidden, "mask": mask}.items())[positional:])
    with hl.capture(model, ":input", ':inputs["hidden"]', ':inputs["mask"]', ":inputs") as acts:
        model(*args, **kwargs, scale=2.0)
    assert acts[":input"].equal(hidden)
    assert acts[':inputs["hidden"]'].equal(hidden)
    assert acts[':inputs["mask"]'].equal(mask)
    assert acts[":inputs"]["scale"] == 2.0
    with hl.patch(model, {':inputs["hidden"]': 7.0}):
        assert model(*args, **kwargs).tolist() == [7.0, 7.0]


def test_nan_infinity_and_negative_zero_are_captured_bit_for_bit() -> None:
    """C11"""
    odd = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-45])
    odd[1:2].view(torch.int32)[0] = 0x7FC12345  # A NaN with a payload.
    model = nn.Sequential(nn.Identity(), nn.Identity())
    for clone in (None, True, False):
        with hl.capture(model, "0", clone=clone) as acts:
            model(odd)
        assert bits(acts["0"]) == bits(odd)
    assert bits(hl.run(model, torch.ones(7), patch={"0": odd})) == bits(odd)


def test_statistics_of_odd_and_empty_values_say_what_is_in_them() -> None:
    """C11"""
    odd = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 3.0, 4.0, -4.0])
    stats = hl.Cache({"odd": odd, "empty": torch.empty(0, 3), "all nan": torch.full((2,), math.nan)}).stats()
    assert stats["odd"].nan == 1 / 8
    assert stats["odd"].inf == 2 / 8
    assert stats["odd"].zeros == 2 / 8
    assert stats["odd"].max == 4.0
    assert stats["odd"].norm == pytest.approx(math.sqrt(41))
    assert math.isnan(stats["empty"].mean)
    assert stats["all nan"].nan == 1.0


def test_under_autocast_the_captured_dtype_is_the_one_that_passed() -> None:
    """C12"""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), torch.randn(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model[0](x)
        output, acts = hl.run(model, x, capture=["0", "1"])
    assert acts["0"].dtype is torch.bfloat16
    assert acts["0"].equal(expected)
    assert acts["1"].dtype is output.dtype
    assert "bfloat16" in repr(acts)


def test_under_autocast_a_patch_of_another_precision_is_refused_with_the_cast_to_write() -> None:
    """C12"""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), torch.randn(2, 4)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        hl.patch(model, {"0": torch.zeros(2, 4)}),
        pytest.raises(hl.EditError, match=says("given where passes", "0", "….to(torch.bfloat16)")),
    ):
        model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert hl.run(model, x, patch={"0": torch.zeros(2, 4).to(torch.bfloat16)}).count_nonzero() == 0
        assert hl.run(model, x, patch={"0": 0.0}).count_nonzero() == 0


def test_autocast_does_not_lower_the_precision_of_statistics_and_differences() -> None:
    """C12"""
    cache = hl.Cache({"a": torch.tensor([1.0, 1.0 + 2**-20])})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert cache.stats()["a"].max == 1.0 + 2**-20
        assert (cache + cache)["a"][1].item() == 2.0 + 2**-19
        assert cache.stack("a").dtype is torch.float32


@pytest.mark.parametrize(
    ("site", "options"),
    [
        ("0", {}),
        ("0", {"clone": True}),
        ("0[:, :2]", {}),
        ("0", {"dtype": torch.float64}),
        ("0", {"transform": lambda value: value * 2}),
        ("0", {"transform": lambda value: value}),
        ("0:input", {}),
    ],
)
def test_what_was_captured_in_inference_mode_can_be_used_in_autograd_and_in_place(
    site: str, options: dict[str, Any]
) -> None:
    """C13"""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    with torch.inference_mode(), hl.capture(model, site, **options) as acts:
        model(torch.randn(2, 4))
    value = acts[site]
    assert not value.is_inference()
    weight = torch.ones_like(value, requires_grad=True)
    (value * weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.equal(value)
    value.add_(1).requires_grad_()


def test_an_activation_in_place_in_inference_mode_leaves_the_captured_value_alone() -> None:
    """C01, C13"""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), torch.randn(3, 4)
    with torch.inference_mode():
        expected = model[0](x)
        _, acts = hl.run(model, x, capture=["0", "1:input", "0[0]"])
    assert acts["0"].equal(expected)
    assert acts["1:input"].equal(expected)
    assert acts["0[0]"].equal(expected[0])


def test_a_reference_can_not_be_checked_in_inference_mode_and_is_refused() -> None:
    """C13"""
    model = nn.Sequential(nn.Linear(4, 4))
    with (
        torch.inference_mode(),
        hl.capture(model, "0", clone=False),
        pytest.raises(hl.HooklineError, match=says("inference mode clone=None", "0")),
    ):
        model(torch.randn(2, 4))


def test_values_made_outside_inference_mode_patch_inside_and_the_other_way_round() -> None:
    """C13"""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 1)), torch.randn(2, 4)
    outside = torch.ones(2, 4)
    with torch.inference_mode():
        inside = torch.ones(2, 4)
        patched = hl.run(model, x, patch={"0": outside})
    again = hl.run(model, x, patch={"0": inside})
    assert again.equal(patched)
    again.sum().backward()
    assert model[2].weight.grad is not None
    assert outside.equal(inside)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_gradient_asked_for_without_grad_mode_is_said_in_the_forward(mode: Callable[[], Any]) -> None:
    """C14"""
    model = nn.Sequential(nn.Linear(4, 4))
    with (
        hl.capture(model, "0:grad_output") as acts,
        mode(),
        pytest.raises(
            hl.NeverFired, match=says("can get no gradient torch", "0:grad_output", f"torch.{mode.__name__}")
        ),
    ):
        model(torch.randn(2, 4))
    with pytest.raises(hl.NotCaptured, match="0:grad_output"):
        acts["0:grad_output"]
    with hl.capture(model, "*:grad_output") as acts, mode(), pytest.warns(hl.HooklineWarning, match=mode.__name__):
        model(torch.randn(2, 4))
    with pytest.raises(hl.NotCaptured, match=mode.__name__):
        acts["0:grad_output"]


def noisy(value: Tensor) -> Tensor:
    return value + torch.randn_like(value)


def test_hooks_draw_no_random_numbers_and_an_observer_that_does_is_not_noticed() -> None:
    """C15"""
    model, x = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5)), torch.randn(3, 4)
    torch.manual_seed(3)
    expected, after = model(x), torch.get_rng_state()
    programs: list[Callable[[], hl.Hooks]] = [
        lambda: hl.capture(model, "**", "**:input", "1:grad_output"),
        lambda: hl.capture(model, "**", transform=noisy),
        lambda: hl.edit(model, "**", lambda value: None),
    ]
    for program in programs:
        torch.manual_seed(3)
        with program():
            assert bits(model(x)) == bits(expected)
        assert torch.get_rng_state().equal(after)


def test_an_expanded_value_stays_expanded() -> None:
    """C16"""
    model = Returns(lambda x: x.expand(1000, 1000))
    for options in ({}, {"clone": True}):
        with hl.capture(model, "", **options) as acts:
            model(torch.tensor([2.0]))
        assert acts[""].equal(torch.full((1000, 1000), 2.0))
        assert acts[""].untyped_storage().nbytes() == 4


@pytest.mark.parametrize(
    "layout", [lambda x: x.to(memory_format=torch.channels_last), lambda x: x.transpose(1, 3), lambda x: x[..., ::2]]
)
@pytest.mark.parametrize("clone", [None, True])
def test_the_memory_layout_is_kept(layout: Callable[[Tensor], Tensor], clone: bool | None) -> None:
    """C16"""
    x = layout(torch.randn(2, 4, 6, 8))
    model = Overwrites(
        lambda x: x.clone() if x.is_contiguous(memory_format=torch.channels_last) else x + 0, Tensor.zero_
    )
    expected = model.source(x)
    with hl.capture(model, "source", clone=clone) as acts:
        model(x)
    assert acts["source"].stride() == expected.stride()
    assert acts["source"].equal(x)


def test_windows_that_overlap_in_memory_are_captured_right() -> None:
    """C16"""
    model = Overwrites(lambda x: (x * 1).unfold(0, 3, 1), lambda windows: windows[0].zero_())
    for clone in (None, True):
        with hl.capture(model, "source", clone=clone) as acts:
            model(torch.arange(5.0))
        assert acts["source"].tolist() == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]


class KeyValues:
    """Like a key-value cache in generation: an object that grows and is written to in each step."""

    def __init__(self) -> None:
        self.layers: list[dict[str, Tensor]] = [{"keys": torch.zeros(0, 2), "fixed": torch.zeros(3, 2)}]
        self.seen = 0

    def update(self, x: Tensor) -> None:
        layer = self.layers[0]
        layer["keys"] = torch.cat([layer["keys"], x])
        layer["fixed"][self.seen] = x[0]
        self.seen += 1


class Steps(nn.Module):
    def forward(self, x: Tensor, past: KeyValues) -> KeyValues:
        past.update(x)
        return past


def test_an_object_that_goes_on_changing_is_captured_as_it_was_at_each_call() -> None:
    """C19"""
    model, past = Steps(), KeyValues()
    with hl.capture(model, "", ':inputs["past"]', keep="all") as acts:
        for number in range(3):
            model(torch.full((1, 2), number + 1.0), past)
    after, before = acts.calls(""), acts.calls(':inputs["past"]')
    assert [kept.seen for kept in after] == [1, 2, 3]
    assert [kept.seen for kept in before] == [0, 1, 2]
    assert [kept.layers[0]["keys"].shape[0] for kept in after] == [1, 2, 3]
    assert [kept.layers[0]["fixed"][:, 0].tolist() for kept in after] == [[1, 0, 0], [1, 2, 0], [1, 2, 3]]
    assert all(type(kept) is KeyValues and kept is not past for kept in after)


def test_a_container_that_is_still_empty_is_captured_empty() -> None:
    """C19"""

    class Past:
        def __init__(self) -> None:
            self.layers: list[Tensor] = []

    class Appends(nn.Module):
        def forward(self, x: Tensor, past: Past, notes: dict[str, Tensor]) -> Tensor:
            past.layers.append(x)
            notes[str(len(notes))] = x
            return x

    model, past, notes = Appends(), Past(), dict[str, Tensor]()
    with hl.capture(model, ":inputs", keep="all") as acts:
        model(torch.ones(1), past, notes)
        model(torch.ones(1), past=past, notes=notes)
    assert [len(kept["past"].layers) for kept in acts.calls(":inputs")] == [0, 1]
    assert [len(kept["notes"]) for kept in acts.calls(":inputs")] == [0, 1]


class Named(Tensor):
    """A tensor subclass."""


EXOTIC: dict[str, Callable[[], Tensor]] = {
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
    "conjugate view": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "negative view": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "bool": lambda: torch.tensor([True, False]),
    "0-dim": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(0, 5),
    "int8": lambda: torch.tensor([1, -2], dtype=torch.int8),
    "uint16": lambda: torch.tensor([1, 2], dtype=torch.uint16),
    "float8": lambda: torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "oneDNN": lambda: torch.randn(2, 2).to_mkldnn(),
    "shared memory": lambda: torch.randn(3).share_memory_(),
    "owned by numpy": lambda: torch.from_numpy(torch.randn(3).numpy().copy()),
    "meta": lambda: torch.empty(3, device="meta"),
    "subclass": lambda: torch.randn(3).as_subclass(Named),
    "Parameter": lambda: nn.Parameter(torch.randn(3)),
}


def plain(tensor: Tensor) -> Any:
    """Return the contents of a tensor of any kind in a form that can be compared."""
    if tensor.is_meta:
        return tuple(tensor.shape)
    if tensor.is_nested:
        return [part.tolist() for part in tensor.unbind()]
    dense = tensor.dequantize() if tensor.is_quantized else tensor
    dense = dense.to_dense() if dense.layout is not torch.strided else dense
    return dense.detach().float().tolist() if dense.dtype is torch.float8_e4m3fn else dense.detach().tolist()


@pytest.mark.parametrize("clone", [None, True])
@pytest.mark.parametrize("kind", EXOTIC)
def test_tensors_of_every_kind_are_captured_and_keep_their_kind(kind: str, clone: bool | None) -> None:
    """C20"""
    value = EXOTIC[kind]()
    expected = plain(value)
    _, acts = hl.run(Returns(lambda: value), capture="") if clone is None else (None, _captured(value))
    kept = acts[""]
    assert kept is not value
    assert (kept.dtype, kept.layout, kept.device, kept.is_quantized) == (
        value.dtype, value.layout, value.device, value.is_quantized,
    )  # fmt: skip
    assert type(kept) is (Tensor if kind == "Parameter" else type(value))
    if kind not in ("oneDNN", "meta", "nested", "jagged", "quantized"):
        with torch.no_grad():
            value.zero_()
    assert plain(kept) == expected
    assert repr(acts)


def _captured(value: Tensor) -> hl.Cache:
    with hl.capture(model := Returns(lambda: value), "", clone=True) as acts:
        model()
    return acts


def test_capturing_runs_the_model_no_more_often_than_the_user_does() -> None:
    """C21"""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)))
    twin = nn.Sequential(nn.BatchNorm1d(4), nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)))
    twin.load_state_dict(model.state_dict())
    x = torch.randn(5, 4)
    expected = twin(x)
    output, _ = hl.run(model, x, capture=["**", "0:input", "1:input", "0[0]"])
    assert bits(output) == bits(expected)
    for name, tensor in twin.state_dict().items():
        assert bits(model.state_dict()[name]) == bits(tensor), name


class Counts(nn.Module):
    """Changes its state in every forward: a Python counter, a buffer, a flag."""

    def __init__(self, needs_values: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.calls = 0
        self.history: list[int] = []
        self.needs_values = needs_values

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(self.calls)
        x = nn.functional.dropout(self.linear(self.norm(x)))
        return x * 2 if self.needs_values and x.sum().item() > 0 else x


@pytest.mark.parametrize("needs_values", [False, True], ids=["on fake tensors", "on a real run"])
def test_a_run_that_hookline_makes_itself_leaves_no_trace(needs_values: bool) -> None:
    """C15, C21"""
    model, x = Counts(needs_values), torch.randn(5, 4)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random, given = torch.get_rng_state(), x.clone()
    report = hl.scan(model, x)
    assert ("real run" in repr(report)) is needs_values
    assert torch.get_rng_state().equal(random)
    assert x.equal(given)
    for name, tensor in model.state_dict().items():
        assert bits(tensor) == bits(state[name]), name
    assert (model.calls, model.training) == (0, True)
    assert model.history == []


def test_one_activation_under_several_names_is_one_piece_of_memory() -> None:
    """C22"""
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Identity(), nn.Sequential(nn.Flatten(0)))
    _, acts = hl.run(model, torch.randn(3, 4), capture=["**", "", "1:input", "2:input"])
    assert len(acts) == 8
    assert "8 sites, 48 bytes" in repr(acts)


def test_a_number_that_the_dtype_cannot_hold_is_refused() -> None:
    model, x = nn.Sequential(nn.Identity()), torch.ones(2, dtype=torch.float16)
    for site in ("0", "0[0]", "0:input"):
        with pytest.raises(hl.EditError, match=says("it can't hold more than", 65504)):
            hl.run(model, x, patch={site: 1e10})
    assert hl.run(model, x, patch={"0": float("inf")}).isinf().all()


def test_the_numbers_of_a_quantized_value_are_kept_in_the_dtype_that_was_asked_for() -> None:
    model = Returns(lambda x: torch.quantize_per_tensor(x, 0.5, 0, torch.qint8))
    with hl.capture(model, "", dtype=torch.float64) as acts:
        model(torch.tensor([0.5, 1.0]))
    assert acts[""].dtype is torch.float64
    assert acts[""].tolist() == [0.5, 1.0]


@pytest.mark.filterwarnings("ignore:.*MaskedTensor:UserWarning")
def test_a_masked_tensor_is_captured_edited_and_counted_by_its_valid_elements() -> None:
    model, x = Returns(lambda x: masked_tensor(x, x > 0)), torch.tensor([-5.0, 1.0, 3.0])
    _, acts = hl.run(model, x, capture="")
    assert acts[""].get_mask().tolist() == [False, True, True]
    assert acts.stats()[""].mean == 2.0
    assert hl.run(model, x, edit={"": lambda value: value}).get_mask().tolist() == [False, True, True]
    with pytest.raises(hl.EditError, match="give a MaskedTensor"):
        hl.run(model, x, patch={"": 0.0})
