"""A watch on a model of which only a part or a method is used: its reports are right, or it warns that it can't see."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl
from tests.errors.wording import says

NAN = float("nan")
X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Coder(nn.Module):
    """A model with two methods that can be used alone: one runs a module, the other runs none."""

    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(4, 6), nn.Linear(6, 4)

    def encode(self, x):
        return torch.log(self.enc(x))

    def decode(self, x):
        return x @ self.dec.weight.T

    def forward(self, x):
        return self.dec(self.enc(x).relu())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        return self.mlp(self.norm(x))


class Net(nn.Module):
    """A model that produces NaN before its second block if `between` is true."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.coder = Coder()

    def forward(self, x, between=False):
        x = self.blocks[0](x)
        x = self.blocks[1](torch.log(-x.abs()) if between else x)
        return self.coder(x)


def found(run, model, *where) -> hl.BadValue:
    with pytest.raises(hl.BadValue) as raised, hl.watch(model, *where):
        run()
    return raised.value


def test_what_is_made_before_a_block_is_not_blamed_on_the_block_whose_first_module_gave_it():
    model = Net()
    for where in ((), ("**.norm",)):
        error = found(lambda: model(X, between=True), model, *where)
        assert str(error.site) == 'blocks.1.norm:inputs["input"]'
        assert str(error.function) == "/log#0"
        assert "in the forward of Net itself." in str(error)


def test_what_a_block_makes_itself_is_blamed_on_it_though_it_is_not_watched():
    class Odd(Block):
        def forward(self, x):
            return self.mlp(torch.log(-self.norm(x).abs()))

    model = Net()
    model.blocks[1] = Odd()
    for where in ((), ("**.mlp",)):
        error = found(lambda: model(X), model, *where)
        assert str(error.function) == "blocks.1/log#0"
        assert "in the forward of 'blocks.1'." in str(error)


def test_what_a_block_has_overwritten_itself_is_not_told_as_coming_in():
    class Odd(Block):
        def forward(self, x):
            return self.mlp(self.norm(x.mul_(NAN)))

    model = nn.Sequential(nn.Linear(4, 4), Odd())
    with torch.no_grad():
        error = found(lambda: model(X), model)
    assert "in the forward of '1', or came in there: its arguments were modified in place." in str(error)


@pytest.mark.parametrize("part", ["coder", "blocks.0"])
def test_a_part_that_is_called_by_itself_with_bad_values_is_told_so(part):
    model = Net()
    error = found(lambda: model.get_submodule(part)(X * NAN), model)
    assert error.function is None
    assert f"It came in with the arguments of '{part}', which was called by itself, not in a forward of Net" in str(
        error
    )
    assert "made" not in str(error)


def test_a_module_that_a_method_calls_by_itself_is_told_so():
    model = Net()
    error = found(lambda: model.coder.encode(X * NAN), model)
    assert "with the arguments of 'coder.enc', which was called by itself, not in a forward of Net" in str(error)


def test_what_comes_into_a_watched_part_while_the_whole_model_runs_is_blamed_on_what_is_around_it():
    model = Net()
    part = model.blocks[1]
    error = found(lambda: model(X, between=True), part)
    assert "with the arguments of Block, from the forward of Net around it, which is not watched" in str(error)
    assert "look at the data" in str(found(lambda: part(X * NAN), part))


def test_a_method_that_runs_no_module_is_not_watched_in_silence():
    model = Net()
    with pytest.warns(hl.HooklineWarning, match=says("nothing was watched hl")):
        with hl.watch(model):
            model.coder.decode(torch.full((2, 6), NAN))
    error = found(lambda: model.coder.decode(torch.full((2, 6), NAN)), model, "coder.decode()")
    assert str(error.site) == 'coder.decode():inputs["x"]'
    assert "with the arguments of 'coder.decode()', which was called by itself" in str(error)
    plain = nn.Sequential(nn.Linear(4, 4))
    with hl.watch(plain):
        pass  # No warning: it has no methods that could have run.


def test_what_a_method_makes_after_its_modules_is_not_unseen_in_silence():
    model = Net()
    with pytest.warns(hl.HooklineWarning, match=says("was called by itself", "coder.encode()")):
        with hl.watch(model):
            model.coder.encode(X)
    error = found(lambda: model.coder.encode(X), model, "**", "coder.encode()")
    assert (str(error.site), str(error.function)) == ("coder.encode()", "coder/log#0")


def test_methods_and_parts_whose_values_are_seen_elsewhere_are_nothing_to_warn_of():
    model = Net()
    with hl.watch(model):
        model.blocks[0](X), model.coder(X)  # Parts of the model: the watch sees their outputs.
    with hl.watch(model):
        model(X)
        model.coder.enc(X)
    with hl.watch(model):
        model.coder.encode(X.abs()).nan_to_num(0).sum().backward()  # A bad loss would show in the gradients.


def test_a_function_that_is_watched_is_blamed_in_the_forward_that_calls_it():
    class Attention(nn.Module):
        def forward(self, x):
            return torch.softmax(torch.log(-x.abs()), -1)

    model = nn.Sequential(nn.Linear(4, 4), Attention())
    error = found(lambda: model(X), model, "1/softmax")
    assert str(error.site) == '1/softmax:inputs["0"]'
    assert str(error.function) == "1/log#0"
    assert "in the forward of '1'." in str(error)
    error = found(lambda: model(X), model, "1/log")
    assert (str(error.site), str(error.function)) == ("1/log", "1/log")
    assert "nothing that went into '1/log' is bad" in str(error)
    assert "second run" not in str(error)


def test_a_method_that_is_watched_is_blamed_with_its_function_also_inside_a_forward():
    class Inner(Coder):
        def forward(self, x):
            return self.dec(self.encode(x))

    model = nn.Sequential(nn.Linear(4, 4), Inner())
    error = found(lambda: model(X), model, "1.encode()")
    assert (str(error.site), str(error.function)) == ("1.encode()", "1/log#0")
