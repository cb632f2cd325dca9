"""Memory shared with numpy, DLPack or ctypes: they hold its address, so a capture must never move it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from tests.errors.wording import says
from tests.support.quick_python import quick_python
from tests.support.running import python

LARGE = 1 << 19  # Elements: 2 MB, too large to be copied without a check.


class Holds(nn.Module):
    """Returns a view of a tensor it holds as a parameter, a buffer, a plain attribute, or in a list."""

    def __init__(self, kind: str, size: int) -> None:
        super().__init__()
        held = torch.zeros(size)
        self.kind = kind
        self.frozen = nn.Parameter(held.clone(), requires_grad=False)
        self.register_buffer("buffer", held.clone(), persistent=False)
        self.plain = held.clone()
        self.listed = [held.clone()]

    @property
    def held(self) -> Tensor:
        return self.listed[0] if self.kind == "listed" else getattr(self, self.kind)

    def forward(self, _x: Tensor) -> Tensor:
        return self.held.detach()[:]


def address_of(tensor: Tensor) -> int:
    return int(torch._C._data_address(tensor))


OPTIONS: list[dict[str, Any]] = [{}, {"keep": "all"}, {"transform": lambda value: value}, {"detach": False}]
EVERY_OPTION = pytest.mark.parametrize("options", OPTIONS, ids=["usual", "keep all", "transform", "detach=False"])
EVERY_SIZE = pytest.mark.parametrize("size", [8, LARGE], ids=["small", "large"])
EVERY_PLACE = pytest.mark.parametrize("place", ["0", "0:input", "0:inputs", "1:input", "1[:]", ""])


@EVERY_SIZE
@EVERY_PLACE
@EVERY_OPTION
def test_a_batch_that_numpy_fills_again_is_captured_as_it_was(size: int, place: str, options: dict[str, Any]) -> None:
    model, batch = nn.Sequential(nn.Identity(), nn.Identity()), torch.zeros(size)
    array = batch.numpy()
    before = address_of(batch)
    with hl.capture(model, place, **{**options, "keep": "all"}) as acts:
        for number in range(3):
            array[:] = number
            model(batch)
    values = [one["input"] if place.endswith("inputs") else one for one in acts.calls(place)]
    assert [one[0].item() for one in values] == [0.0, 1.0, 2.0] if options.get("detach", True) else True
    batch.add_(1)
    assert address_of(batch) == before
    assert array[0] == 3


@EVERY_SIZE
@pytest.mark.parametrize("kind", ["frozen", "buffer", "plain", "listed"])
@EVERY_OPTION
def test_what_a_model_holds_stays_where_it_is(kind: str, size: int, options: dict[str, Any]) -> None:
    model = nn.Sequential(Holds(kind, size), nn.Identity())
    array = model[0].held.detach().numpy()
    before = address_of(model[0].held)
    with hl.capture(model, "*", "*:input", "", **options) as acts:
        model(torch.ones(1))
    with torch.no_grad():
        model[0].held.add_(5)
    assert address_of(model[0].held) == before
    assert array[0] == 5
    if options.get("detach", True):
        assert acts["0"][0] == acts["1:input"][0] == acts["1"][0] == acts[""][0] == 0


@pytest.mark.process
def test_an_array_of_a_captured_tensor_lives_on_after_the_cache() -> None:
    code = """
import torch, hookline as hl
from torch import nn
value = torch.zeros(1 << 24)
array = value.numpy()
_, acts = hl.run(nn.Sequential(nn.Identity()), value, capture="0")
value.add_(1)
del acts
print(array[:3].tolist())
"""
    assert python("-c", code, command=quick_python()).strip() == "[1.0, 1.0, 1.0]"


def test_dlpack_and_ctypes_see_what_the_tensor_has() -> None:
    model, value = nn.Sequential(nn.Identity()), torch.zeros(LARGE)
    through_dlpack = numpy.from_dlpack(value)
    through_ctypes = (ctypes.c_float * LARGE).from_address(value.data_ptr())
    with hl.capture(model, "0", "0:input") as acts:
        model(value)
    value.fill_(7)
    assert through_dlpack[3] == through_ctypes[3] == 7
    through_ctypes[3] = 9
    assert acts["0"][3] == acts["0:input"][3] == 0


def test_a_model_that_compares_addresses_of_its_inputs_gives_the_same() -> None:
    class Compares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            before = x.data_ptr()
            return self.inner(x) * (x.data_ptr() == before)

    model, x = Compares(), torch.ones(LARGE)
    with hl.capture(model, "inner", "inner:input", ""):
        assert model(x)[0] == 1


@EVERY_SIZE
@pytest.mark.parametrize("way", ["patch", "skip", "edit"])
def test_a_value_that_the_user_puts_in_stays_where_it_is(size: int, way: str) -> None:
    model, given = nn.Sequential(nn.Identity(), nn.Identity()), torch.zeros(size)
    array, before = given.numpy(), address_of(given)
    change: dict[str, Callable[[], hl.Hooks]] = {
        "patch": lambda: hl.patch(model, {"0": given}),
        "skip": lambda: hl.skip(model, "0", given),
        "edit": lambda: hl.edit(model, "0", lambda _: given),
    }
    with change[way](), hl.capture(model, "*") as acts:
        model(torch.ones(size))
    given.add_(2)
    assert address_of(given) == before
    assert array[0] == 2
    assert acts["0"][0] == acts["1"][0] == 0


def test_what_an_edit_function_keeps_does_not_move_the_models_input() -> None:
    model, x, kept = nn.Sequential(nn.Identity()), torch.zeros(LARGE), []
    array = x.numpy()
    with hl.edit(model, "0:input", lambda value: kept.append(value)):
        model(x)
    x.add_(1)
    kept.clear()
    assert array[0] == 1


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_what_the_forward_made_is_still_shared(mode: Any) -> None:
    if mode is torch.enable_grad and torch.__version__ < "2.5":
        pytest.skip("needs torch 2.5, before which what autograd saves is copied at once")
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4), nn.Dropout(), nn.Linear(4, 4)).eval()
    made: dict[str, Tensor] = {}
    for name, layer in model.named_children():
        layer.register_forward_hook(lambda _layer, _args, output, name=name: made.update({name: output}))
    with mode(), hl.capture(model, "*") as acts:
        model(torch.ones(3, 2, 4))
    assert [name for name in made if address_of(acts[name]) == address_of(made[name])] == list(acts)


def test_large_inputs_that_the_forward_made_are_shared_without_watching_what_made_them() -> None:
    model = nn.Sequential(nn.Linear(64, 1 << 13), nn.ReLU(), nn.Linear(1 << 13, 4))
    made: list[Tensor] = []
    model[1].register_forward_hook(lambda _layer, _args, output: made.append(output))
    with torch.no_grad(), hl.capture(model, "2:input") as acts:
        model(torch.ones(64, 64))
    assert address_of(acts["2:input"]) == address_of(made[0])


@EVERY_SIZE
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("place", ["0", "1:input", "1"])
def test_an_array_that_the_model_makes_of_an_activation_follows_it(size: int, grad: bool, place: str) -> None:
    class Exposes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = (x * 2).relu()
            self.array = y.detach().numpy()
            return y

    class Adds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                return x.add_(1)

    model = nn.Sequential(Exposes(), nn.Identity(), Adds())
    with hl.capture(model, place) as acts:
        model(torch.ones(size, requires_grad=grad))
    assert model[0].array[0] == 3
    assert acts[place][0] == 2


@EVERY_SIZE
def test_an_array_that_is_made_after_the_first_look_follows_the_tensor(size: int) -> None:
    class Exposes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            h = x * 2
            h = self.inner(h)
            self.array = h.numpy()
            self.inner(h)
            return h.fill_(7)

    model = Exposes()
    with torch.no_grad(), hl.capture(model, "inner", "inner:input", keep="all") as acts:
        model(torch.ones(size))
    del acts
    assert model.array[0] == 7


def test_an_edit_may_return_memory_that_an_array_owns() -> None:
    model, array = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True)), numpy.full((2, 2), -1.0, dtype=numpy.float32)
    with hl.edit(model, "0", lambda _: torch.from_numpy(array)):
        assert model(torch.ones(2, 2)).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert (array == -1).all()


def test_looking_does_not_unpack_what_autograd_saved() -> None:
    class Keeps(nn.Module):
        runs = 0

        def forward(self, x: Tensor) -> Tensor:
            self.runs += 1
            y = x.exp()
            self.kept = y.detach()
            return y

    keeps = Keeps()
    model = nn.Sequential(nn.Linear(4, 4), keeps, nn.Identity())
    for site in ("1", "2:input"):
        keeps.runs = 0
        with hl.capture(model, site):
            checkpoint(model, torch.ones(2, 4), use_reentrant=False)
        assert keeps.runs == 1

    class Differentiates(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            torch.autograd.grad(y.sum(), x)
            return y

    model = nn.Sequential(Differentiates(), nn.Identity())
    with hl.capture(model, "0", "1:input", "1"):
        model(torch.ones(2, requires_grad=True))


@pytest.mark.parametrize("port", ["input", "inputs", "output"])
def test_an_array_or_a_bytearray_that_passes_is_kept_as_it_was(port: str) -> None:
    model, array, data = nn.Sequential(nn.Identity()), numpy.zeros(3), bytearray(b"abc")
    with hl.capture(model, f"0:{port}", keep="all") as acts:
        for number in range(3):
            array[:] = number
            data[0] = number
            model(array)
            model(data)
    values = [one["input"] if port == "inputs" else one for one in acts.calls(f"0:{port}")]
    assert [one[0] for one in values] == [0, 0, 1, 1, 2, 2]


def test_an_array_among_the_arguments_can_be_patched_and_edited() -> None:
    class Takes(nn.Module):
        def forward(self, array: Any) -> Tensor:
            return torch.from_numpy(array) * 1

    model, array = Takes(), numpy.ones(3)
    assert hl.run(model, array, patch={":input": numpy.zeros(3)}).tolist() == [0, 0, 0]
    assert hl.run(model, array, edit={":input": lambda value: value * 5}).tolist() == [5, 5, 5]
    with pytest.raises(hl.EditError, match=says("of which no part can")):
        hl.run(model, array, patch={":input[0]": 0.0})
    assert array.tolist() == [1, 1, 1]
