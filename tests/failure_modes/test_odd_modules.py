"""Odd kinds of modules and tensors: captures at every port, and edits that change nothing, have no effect."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.masked import masked_tensor
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline._kernel import leaves
from tests.failure_modes.every_port import differences, numbers_in
from tests.support.models import Returns


class Around(nn.Module):
    """Puts a linear layer before the module under test, so that gradients flow, and one beside it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.inner = inner
        self.beside = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        x = self.before(x)
        return self.inner(x), self.beside(x)


class Recurrent(nn.Module):
    """Keeps a state between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.state: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.state.append(self.cell(x, self.state[-1] if self.state else None))
        self.seen += 1
        latest = self.state[-1]
        self.state = [latest.detach()] if len(self.state) > 2 else self.state
        return latest


class Fills(nn.Module):
    """Calls a child with a list, a dict and the same tensor for two arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Returns(self.fill)

    def fill(self, a: Tensor, b: Tensor, into: list[Tensor], by_name: dict[str, Tensor]) -> Tensor:
        into.append(a * 2)
        by_name["a"] = into[0] + by_name["start"]
        return a * 3 if a is b else a * 0

    def forward(self, x: Tensor) -> Any:
        into, by_name = [x * 5], {"start": x}
        return self.child(x, x, into, by_name=by_name), into, by_name


class ReadsParameter(nn.Module):
    """Returns views of its parameter and buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("table", torch.randn(4, 4))

    def forward(self, x: Tensor) -> Any:
        return self.weight[:2], self.weight.T, self.table[1:], x @ self.weight


class Checkpointed(nn.Module):
    """Runs its child under a checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.child = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 4))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.child, x, use_reentrant=self.reentrant)


class Autocast(nn.Module):
    """Computes in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.child(x)


def odd_strides(x: Tensor) -> Tensor:
    return x[:1].clone().as_strided((1, 4), (77, 1))


def in_place(x: Tensor) -> Tensor:
    y = x * 2
    y[:, 0] = 0
    return y.mul_(3).add_(1)


def jagged(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 3]))


class SelfAttention(nn.Module):
    """Attention whose three arguments are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x, need_weights=False)


@torch.inference_mode()
def inference(x: Tensor) -> Tensor:
    return x * 2


KINDS: dict[str, Callable[[], nn.Module]] = {
    "sparse": lambda: Returns(lambda x: x.to_sparse()),
    "sparse rows": lambda: Returns(lambda x: x.to_sparse_csr()),
    "jagged": lambda: nn.Sequential(Returns(jagged), nn.Linear(4, 4)),
    "masked": lambda: Returns(lambda x: masked_tensor(x.detach(), x.detach() > 0)),
    "quantized": lambda: Returns(lambda x: torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8)),
    "complex": lambda: Returns(lambda x: torch.fft.fft(x).conj()),
    "negative": lambda: Returns(lambda x: torch.view_as_complex(x.reshape(-1, 2, 2)).imag),
    "views of parameters": ReadsParameter,
    "a weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "a spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
    "a checkpoint": lambda: Checkpointed(False),
    "a reentrant checkpoint": lambda: Checkpointed(True),
    "autocast": Autocast,
    "state": Recurrent,
    "mutable arguments": Fills,
    "strides": lambda: nn.Sequential(Returns(odd_strides), Returns(lambda x: x * x.stride(0))),
    "writing in place": lambda: Returns(in_place),
    "nothing": lambda: Returns(lambda x: None),
    "no tensor": lambda: Returns(lambda x: (1, "two", {"three": 3.0}, [None])),
    "an empty tensor": lambda: Returns(lambda x: x[:0]),
    "an expanded tensor": lambda: Returns(lambda x: x[:1].expand(5, 4)),
    "self-attention": SelfAttention,
    "lstm": lambda: nn.LSTM(4, 4, 2),
    "dropout": lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4)).train(),
    "batch norm": lambda: nn.BatchNorm1d(4).train(),
    "a lazy layer": lambda: nn.LazyLinear(3),
    "random numbers": lambda: Returns(lambda x: x + torch.randn_like(x)),
    "inference mode": lambda: Returns(inference),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Hide the warnings that torch's masked, sparse and nested tensors are prototypes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def built(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Around(KINDS[kind]())
    given = {"x": torch.randn(3, 4)}
    if kind == "a lazy layer":
        model(**given)
    return model, given


@pytest.mark.parametrize("kind", KINDS)
def test_looking_at_every_port_changes_nothing(kind: str) -> None:
    model, given = built(kind)
    assert differences(model, given) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("port", ["output", "input", "inputs"])
def test_an_edit_that_changes_nothing_changes_nothing(kind: str, port: str) -> None:
    model, given = built(kind)
    for function in (lambda value: value, lambda _: None):
        assert differences(model, given, lambda hooks: hooks.edit([f"**:{port}", f":{port}"], function)) == []  # noqa: B023


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_captured_is_what_passes(kind: str) -> None:
    model, given = built(kind)
    seen: list[Any] = []
    handle = model.inner.register_forward_hook(lambda _module, _args, output: seen.append(output))
    with hl.capture(model, "inner") as acts:
        model(**given)
    handle.remove()
    kept, passed = leaves(acts["inner"]), leaves(seen[0])
    assert [type(one) for one in kept] == [type(one) for one in passed]
    assert [numbers_in(one).tolist() for one in kept] == [numbers_in(one).tolist() for one in passed]
