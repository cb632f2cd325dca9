"""Hooks don't replace lists, dicts, dataclasses and caches in arguments and outputs with copies."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says


@dataclasses.dataclass
class State:
    """Memory that the caller passes and a module fills."""

    seen: list[Tensor]
    latest: Tensor | None = None


class Memory:
    """Like State, but a plain object, as key-value caches are."""

    def __init__(self) -> None:
        self.layers: list[Tensor] = []
        self.latest: Tensor | None = None


class Writes(nn.Module):
    """Writes a value into a container of any type, and uses the values already there."""

    def forward(self, x: Tensor, memory: Any) -> Tensor:
        earlier = contents(memory)
        x = x + sum(earlier) if earlier else x
        if isinstance(memory, (list, deque)):
            memory.append(x * 2)
        elif isinstance(memory, dict):
            memory[f"step {len(memory)}"] = x * 2
        elif isinstance(memory, State):
            memory.seen.append(x * 2)
            memory.latest = x
        else:
            memory.layers.append(x * 2)
            memory.latest = x
        return x * 3


class Net(nn.Module):
    """Calls `Writes` twice with one container."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.writes = Writes()

    def forward(self, x: Tensor, memory: Any) -> tuple[Tensor, Any]:
        x = self.first(x)
        x = self.writes(x, memory)
        return self.writes(x, memory), memory


def contents(memory: Any) -> list[Tensor]:
    """Return the tensors in a container, in order."""
    if isinstance(memory, dict):
        return list(memory.values())
    if isinstance(memory, State):
        return [*memory.seen, *([] if memory.latest is None else [memory.latest])]
    if isinstance(memory, Memory):
        return [*memory.layers, *([] if memory.latest is None else [memory.latest])]
    return list(memory)


CONTAINERS: list[Callable[[], Any]] = [list, deque, dict, lambda: State([]), Memory]
EVERY_CONTAINER = pytest.mark.parametrize("container", CONTAINERS, ids=["list", "deque", "dict", "dataclass", "object"])
WATCHING: dict[str, Callable[[nn.Module], hl.Hooks]] = {
    "grad_inputs": lambda model: hl.capture(model, "writes:grad_inputs", keep="all"),
    "grad_output": lambda model: hl.capture(model, ":grad_output", "**:grad_output", keep="all"),
    "every port": lambda model: hl.capture(model, *[f"writes:{port}" for port in PORTS], keep="all"),
    "an edit that returns its arguments": lambda model: hl.edit(model, "writes:inputs", lambda passed: passed),
    "an edit that returns other arguments": lambda model: hl.edit(model, "writes:inputs", lambda passed: dict(passed)),
    "an edit that returns its output": lambda model: hl.edit(model, "", lambda output: output),
    "an edit that takes its output apart": lambda model: hl.edit(model, "", lambda output: (output[0], output[1])),
}
PORTS = ("output", "input", "inputs", "grad_output", "grad_input", "grad_inputs")


@EVERY_CONTAINER
@pytest.mark.parametrize("way", WATCHING)
def test_a_module_writes_into_the_container_that_it_was_given(container: Callable[[], Any], way: str) -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(2, 3)
    expected, memory = model(x, container())
    expected_memory = contents(memory)
    given = container()
    with WATCHING[way](model):
        output, returned = model(x, given)
        (output.sum() + sum(one.sum() for one in contents(returned))).backward()
    assert returned is given
    assert output.equal(expected)
    assert [one.tolist() for one in contents(given)] == [one.tolist() for one in expected_memory]


@EVERY_CONTAINER
def test_what_was_in_a_container_before_is_still_there_after_its_gradient_was_followed(container: Any) -> None:
    model, x, given = Net(), torch.ones(2, 3), container()
    before = torch.ones(2, 3, requires_grad=True)
    Writes()(before, given)
    held = contents(given)
    with hl.capture(model, "writes#0:grad_inputs") as acts:
        output, _ = model(x, given)
        output.sum().backward()
    assert contents(given)[0] is held[0]
    gradient = contents(acts["writes#0:grad_inputs"]["memory"])[0]
    assert gradient.ne(0).all()  # The first call used the tensor.


def test_the_gradient_of_a_tensor_in_a_list_is_that_of_this_use_of_it() -> None:
    model, x = Net(), torch.ones(2, 3)
    before = torch.ones(2, 3, requires_grad=True)
    given = [before * 1]
    inside = given[0]
    with hl.capture(model, "writes#0:grad_inputs") as acts:
        output, _ = model(x, given)
        (output.sum() + 10 * inside.sum()).backward()
    # Through the first call: its output (× 3) and its list entry (× 2) both go into the second call's output (× 3).
    assert acts["writes#0:grad_inputs"]["memory"][0].unique().tolist() == [15.0]


def test_a_container_is_as_it_was_when_the_forward_fails() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor, memory: list[Tensor]) -> Tensor:
            memory.append(x)
            raise ValueError("no")

    model = nn.ModuleDict({"fails": Fails()})
    held = torch.ones(2, requires_grad=True) * 1
    given = [held]
    with pytest.raises(ValueError, match="no"), hl.capture(model, "fails:grad_inputs"):
        model["fails"](torch.ones(2), given)
    assert given[0] is held
    assert len(given) == 2


@EVERY_CONTAINER
def test_a_change_of_one_leaf_among_the_arguments_lasts_for_the_call_alone(container: Any) -> None:
    model, x, given = Net(), torch.ones(2, 3), container()
    Writes()(torch.ones(2, 3), given)
    held = contents(given)
    places = {"list": "[0]", "deque": "[0]", "dict": '["step 0"]', "State": '["seen"][0]', "Memory": '["layers"][0]'}
    site = f'writes#0:inputs["memory"]{places[type(given).__name__]}'
    plain, _ = model(x, container())
    with hl.patch(model, {site: 100.0}):
        output, returned = model(x, given)
    assert returned is given
    assert contents(given)[0] is held[0]
    assert len(contents(given)) > len(held)
    assert (output - plain).min() > 100


def test_an_edit_function_may_write_into_a_list_that_it_is_given() -> None:
    model, x = Net(), torch.ones(2, 3)
    held = torch.zeros(2, 3)
    given = [held]

    def fill(passed: dict[str, Any]) -> dict[str, Any]:
        passed["memory"][0] += 7
        return passed

    with hl.edit(model, "writes#0:inputs", fill):
        output, _ = model(x, given)
    assert given[0] is held
    assert held.count_nonzero() == 0
    assert len(given) == 3
    assert output.ne(model(x, [torch.zeros(2, 3)])[0]).all()


def test_what_a_module_keeps_for_itself_is_not_changed_by_a_patch_of_its_output() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept = [torch.ones(2)]

        def forward(self, _x: Tensor) -> list[Tensor]:
            return self.kept

    model = nn.Sequential(Keeps())
    with hl.patch(model, {"0[0]": 0.0}):
        assert model(torch.ones(1))[0].tolist() == [0.0, 0.0]
    assert model(torch.ones(1))[0].tolist() == [1.0, 1.0]


def test_what_a_module_keeps_is_not_changed_by_a_patch_of_its_parents_output() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept = [torch.ones(2)]

        def forward(self, _x: Tensor) -> list[Tensor]:
            return self.kept

    class Passes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.keeps = Keeps()

        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"one": self.keeps(x), "other": self.keeps(x)}

    model = Passes()
    with hl.patch(model, {'["one"][0]': 0.0}):
        patched = model(torch.ones(1))
    assert patched["one"][0].tolist() == [0.0, 0.0]
    assert patched["other"][0].tolist() == [1.0, 1.0]
    assert model.keeps.kept[0].tolist() == [1.0, 1.0]


def test_parameters_that_a_module_keeps_in_a_list_stay_there_and_their_gradient_is_refused() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.kept = [self.weight]

        def forward(self, _x: Tensor) -> list[Tensor]:
            return self.kept

    model = nn.Sequential(Keeps())
    with (
        pytest.raises(hl.NeverFired, match=says("others hold the list", "0:grad_output")),
        hl.capture(model, "0:grad_output"),
    ):
        model(torch.ones(1))
    assert model[0].kept[0] is model[0].weight


class Stores(nn.Module):
    """Returns the same tensor that it writes into a list."""

    def __init__(self, beside: bool) -> None:
        super().__init__()
        self.beside = beside

    def forward(self, x: Tensor, memory: list[Tensor]) -> Any:
        made = x * 2
        memory.append(made)
        return (x * 3, made, memory) if self.beside else made


@pytest.mark.parametrize("beside", [True, False], ids=["returns the list", "keeps the list back"])
def test_what_a_module_returns_and_writes_into_a_list_is_one_tensor_with_one_gradient(beside: bool) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stores = Stores(beside)

        def forward(self, x: Tensor) -> Tensor:
            memory = [x * 5]
            result = self.stores(x, memory)
            made = result[1] if beside else result
            assert made is memory[1]
            return made * 11 + memory[1] * 13 + memory[0] * 17 + (result[0] * 7 if beside else 0)

    x = torch.ones(2, requires_grad=True)
    model = Reads()
    with hl.capture(model, "stores:grad_output", "stores:grad_inputs") as acts:
        model(x).sum().backward()
    gradient = acts["stores:grad_output"]
    of_made = gradient[1] if beside else gradient
    assert of_made.tolist() == [24.0, 24.0]
    if beside:
        assert gradient[0].tolist() == [7.0, 7.0]
        assert gradient[2][0] is None  # It was in the list before, and can't be replaced there.
        assert gradient[2][1].tolist() == [24.0, 24.0]


def test_two_arguments_that_are_one_tensor_stay_one() -> None:
    class Same(nn.Module):
        def forward(self, a: Tensor, b: Tensor, c: Any = None) -> Tensor:
            return a * 2 if a is b and (c is None or c[0] is a) else a * 0

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.same = Same()

        def forward(self, x: Tensor) -> Tensor:
            return self.same(x, x) + self.same(x, b=x, c=[x])

    model, x = Calls(), torch.ones(2, requires_grad=True)
    for port in ("grad_input", "grad_inputs", 'grad_inputs["b"]'):
        with hl.capture(model, f"same:{port}", keep="all") as acts:
            output = model(x)
            output.sum().backward()
        assert output.tolist() == [4.0, 4.0]
        assert len(acts.calls(f"same:{port}")) == 2


def test_an_edit_that_returns_a_part_as_it_was_leaves_the_tensor_alone() -> None:
    class Same(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a * 2 if a is b else a * 0

    model, x = Same(), torch.ones(2, 3)
    with hl.edit(model, ":input[:, -1]", lambda part: part):
        assert model(x, x).unique().tolist() == [2.0]
    with hl.edit(model, ":input[:, -1]", lambda part: part.mul_(3)):
        assert model(x, x).unique().tolist() == [0.0]
    assert x.unique().tolist() == [1.0]


def test_self_attention_takes_the_same_branch_when_its_gradients_are_followed() -> None:
    torch.manual_seed(0)
    model, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    expected, _ = model(x, x, x)
    x.requires_grad_()
    with hl.capture(model, ":grad_input") as acts:
        output, _ = model(x, x, x)
        output.sum().backward()
    assert output.equal(expected)
    assert torch.allclose(acts[":grad_input"], x.grad)


class NormOverChannels(nn.Module):
    """A layer norm over the channels of an image. Its output is in channels-last memory."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@pytest.mark.parametrize("port", ["grad_input", "grad_inputs", "grad_output"])
def test_strides_of_a_dimension_of_size_one_stay(port: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 24, 1), NormOverChannels(24), nn.Identity(), nn.Conv2d(24, 32, 2, 2))
    x = torch.randn(1, 3, 8, 8)
    expected = model(x)
    with hl.capture(model, f"*:{port}") as acts:
        output = model(x.requires_grad_())
        output.sum().backward()
    assert output.equal(expected)
    assert f"3:{port}" in acts

    class Stride(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.stride(0)

    odd = torch.ones(1, 4).as_strided((1, 4), (77, 1)).requires_grad_()
    model = nn.Sequential(nn.Identity(), Stride())
    with hl.capture(model, f"*:{port}"):
        assert model(odd).tolist() == [[77.0] * 4]


class KeepsState(nn.Module):
    """Returns a dict that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.state = {"w": self.weight, "a": torch.ones(2)}

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.state["x"] = x * 2
        return self.state


class PassesOn(nn.Module):
    """Returns the output of its child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = KeepsState()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.child(x)


def test_what_a_child_keeps_is_not_changed_by_a_patch_of_its_parents_output() -> None:
    model = PassesOn()
    with hl.patch(model, {'["a"]': 0.0}):
        assert model(torch.ones(2))["a"].tolist() == [0.0, 0.0]
    assert model.child.state["a"].tolist() == [1.0, 1.0]


def test_looking_at_gradients_leaves_what_a_child_keeps() -> None:
    model = PassesOn()
    with pytest.raises(hl.NeverFired, match=says("others hold the list")), hl.capture(model, ":grad_output"):
        model(torch.ones(2))["x"].sum()
    with hl.capture(model, ':grad_output["x"]'):
        output = model(torch.ones(2, requires_grad=True))
        output["x"].sum().backward()
    assert model.child.state["w"] is model.child.weight
    assert output is model.child.state


def test_a_dict_may_have_tensors_for_keys() -> None:
    model, given = Net(), {torch.ones(2): torch.ones(2, 3, requires_grad=True) * 2, torch.zeros(2): torch.ones(2, 3)}
    held = list(given.values())
    with hl.capture(model, "writes:grad_inputs", keep="all"):
        model(torch.ones(2, 3), given)
    assert all(one is other for one, other in zip(given.values(), held, strict=False))


def test_threads_that_pass_one_container_leave_it_as_it_was() -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor, memory: dict[str, Tensor]) -> Tensor:
            return x + memory["a"]

    model = nn.ModuleDict({"reads": Reads()})
    held = torch.ones(2, requires_grad=True) * 2
    given = {"a": held}
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(60):
                with hl.capture(model, "reads:grad_inputs"), hl.patch(model, {'reads:inputs["memory"]["a"]': number}):
                    model["reads"](torch.ones(2, requires_grad=True), given)
        except BaseException as error:
            failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failed == []
    assert given["a"] is held


def test_a_thread_that_begins_while_two_hooks_of_another_act_puts_back_what_the_caller_had() -> None:
    first_is_inside, second_is_inside, first_is_over = threading.Event(), threading.Event(), threading.Event()

    class Reads(nn.Module):
        def forward(self, memory: dict[str, Tensor]) -> Tensor:
            if not first_is_inside.is_set():
                first_is_inside.set()
                assert second_is_inside.wait(60)
            else:
                second_is_inside.set()
                assert first_is_over.wait(60)
            return memory["a"] + 0

    model, held = nn.ModuleDict({"reads": Reads()}), torch.ones(2, requires_grad=True) * 2
    given = {"a": held}

    def first() -> None:
        with hl.capture(model, "reads:grad_inputs"), hl.patch(model, {'reads:inputs["memory"]["a"]': 3.0}):
            model["reads"](given)

    def second() -> None:
        with hl.patch(model, {'reads:inputs["memory"]["a"]': 4.0}):
            model["reads"](given)

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert first_is_inside.wait(60)
    threads[1].start()
    threads[0].join(60)
    first_is_over.set()
    threads[1].join(60)
    assert given["a"] is held


def test_a_container_is_as_it_was_after_a_ctrl_c_at_any_moment() -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor, memory: list[Tensor]) -> Tensor:
            return x + memory[0]

    model, held = nn.ModuleDict({"reads": Reads()}), torch.ones(2, requires_grad=True) * 2
    given, moment, left = [held], 0, 0

    def interrupt(frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal left
        if sys.version_info < (3, 11) and frame.f_lasti >= 0:
            return  # A generator that goes on. Python 3.10 would end it without its `finally`, unlike a real Ctrl-C.
        if event == "call" and "hookline" in frame.f_code.co_filename:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    is_over = False
    while not is_over:
        moment += 1
        left = moment
        with hl.capture(model, "reads:grad_inputs").when_missing("ignore"):
            sys.setprofile(interrupt)
            try:
                model["reads"](torch.ones(2), given)
                is_over = True
            except KeyboardInterrupt:
                pass
            finally:
                sys.setprofile(None)
        assert given[0] is held, f"after an interrupt in function call {moment}"
    assert moment > 50


def test_a_change_of_gradients_that_leaves_a_tensor_out_warns() -> None:
    class Appends(nn.Module):
        def forward(self, values: list[Tensor]) -> list[Tensor]:
            values.append(values[0] * 2)
            return values

    model, x = Appends(), torch.ones(2, requires_grad=True)
    with pytest.warns(hl.HooklineWarning, match=says("is changed only in part", ":grad_output")) as said:
        with hl.patch(model, {":grad_output": 0.0}):
            sum(model([x * 1])).sum().backward()
    assert len(said) == 1
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 1.0]  # Only the gradient of the second tensor is set to 0.
    with hl.patch(model, {":grad_output[1]": 0.0}):
        sum(model([x * 1])).sum().backward()
    with hl.capture(model, ":grad_output"):
        sum(model([x * 1])).sum().backward()
