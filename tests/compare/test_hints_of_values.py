"""Hints that show in values: a relation of outputs, a module that one model leaves out, a function that parts."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import hookline as hl
from tests.support.compared_blocks import Block, pair

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


class WithoutResidual(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.attn(self.norm(x)) * self.scale
        return x + self.mlp(x)


def test_a_missing_residual_connection_inside_is_named():
    first = hl.compare(*pair(WithoutResidual), run=(X,)).first
    assert first.site == ""
    assert first.hint == "what 'mlp' gets in a is b's plus the input: b leaves out the residual connection"
    assert first.function == "mlp:inputs"


def test_the_function_at_which_the_error_begins_is_named():
    class Softer(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.softmax(self.mlp(x), -1)

    class Harder(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.softmax(self.mlp(x), -2)

    a = Softer()
    b = Harder()
    b.load_state_dict(a.state_dict())
    first = hl.compare(nn.Sequential(a), nn.Sequential(b), run=(X,)).first
    assert first.function == "0/softmax#0"
    assert first.hint == "in /softmax#0, dim is -1 in a and -2 in b"


class WithoutNorm(Block):
    def __init__(self) -> None:
        super().__init__()
        del self.norm

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x) * self.scale
        return x + self.mlp(x)


def test_a_module_that_one_of_them_does_not_have_is_named():
    torch.manual_seed(0)
    a, b = Block(), WithoutNorm()
    b.load_state_dict(a.state_dict(), strict=False)
    assert (
        hl.compare(a, b, run=(X,)).first.hint == "what 'attn' gets in a is the output of 'norm', which b does not have"
    )
    hint = hl.compare(b, a, run=(X,)).first.hint
    assert hint == "what 'attn' gets in b is the output of 'norm', which a does not have"


class Theirs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.LayerNorm(8))
        self.head = nn.Linear(8, 3)
        with torch.no_grad():
            self.body[3].weight.add_(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)) * 2


class Port(nn.Module):
    """The same with other names; `without` is what it leaves out."""

    def __init__(self, a: Theirs, without: str = "") -> None:
        super().__init__()
        self.up, self.down, self.norm, self.out = copy.deepcopy([a.body[0], a.body[2], a.body[3], a.head])
        self.without = without

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden = self.down(hidden if self.without == "act" else torch.nn.functional.gelu(hidden))
        return self.out(hidden if self.without == "norm" else self.norm(hidden)) * 2


def test_a_module_that_a_port_leaves_out_is_named():
    a = Theirs()
    assert hl.compare(a, Port(a), run=(X,)).ok
    first = hl.compare(a, Port(a, "norm"), run=(X,)).first
    assert first.hint == "what 'head' gets in a is the output of 'body.3', which b does not have"
    assert first.function == "out:inputs"
    first = hl.compare(a, Port(a, "act"), run=(X,)).first
    assert first.hint == "what 'body.2' gets in a is the output of 'body.1', which b does not have"


def test_a_function_that_gets_the_output_of_another_module_is_named():
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.gate, self.act, self.up = nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.gate(x)) * self.up(x)

    class NotGated(Gated):
        def forward(self, x: Tensor) -> Tensor:
            return self.gate(x) * self.up(x)

    first = hl.compare(Gated(), NotGated(), run=(X,)).first
    assert first.hint == "/mul#0 gets the output of 'act' in a, and that of 'gate' in b"


def test_one_number_has_no_relation():
    class Total(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sin().sum()

    class Other(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).cos().sum()

    torch.manual_seed(0)
    a, b = Total(), Other()
    b.load_state_dict(a.state_dict())
    assert "times" not in hl.compare(a, b, run=(X,)).first.hint


def test_another_activation_that_b_computes_by_a_function_is_named():
    class Modules(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.up, self.act, self.down = nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.act(self.up(x)))

    class Functions(Modules):
        def __init__(self) -> None:
            super().__init__()
            del self.act

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.nn.functional.gelu(self.up(x), approximate="tanh"))

    words = "a computes gelu (exact), and b gelu (tanh)"
    assert hl.compare(Modules(), Functions(), run=(X,)).first.hint == words

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Modules()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mlp(x)

    class Flat(Functions):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x)

    assert hl.compare(Nested(), Flat(), run=(X,)).first.hint == words
