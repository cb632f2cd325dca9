"""Methods, functions and parameters beside what else goes on: other threads, recomputations, code that looks on."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hookline as hl
from tests.support.models import Returns


class Checkpoints(nn.Module):
    """Checkpoints a method of its own, or the forward of its child, by the bound method."""

    def __init__(self, reentrant: bool, child: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.reentrant, self.child = reentrant, child

    def helper(self, x: Tensor) -> Tensor:
        return self.layer(x).sin()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer.forward if self.child else self.helper, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("site", ["helper():input", "helper()", "layer:input", "layer"])
def test_a_method_that_is_checkpointed_itself_is_edited_on_its_recomputation_after_the_block(
    site: str, reentrant: bool
) -> None:
    model, x = Checkpoints(reentrant, child=site.startswith("layer")), torch.randn(2, 3, requires_grad=True)
    grads = []
    for inside in (True, False):
        model.zero_grad()
        with hl.edit(model, site, lambda value: value * 3):
            output = model(x)
            if inside:
                output.sum().backward()
        if not inside:
            output.sum().backward()
        grads.append(model.layer.weight.grad)
    torch.testing.assert_close(grads[0], grads[1])
    assert grads[0].abs().sum() > 0


class Busy(nn.Module):
    """Has a function and a parameter to hook, and gives one number."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.ones(4, 7))

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(x @ self.W, dim=-1).sum()[None] * (x @ self.W).sum()


def beside(
    work: Callable[[], Any], other: Callable[[], Any], around: Callable[[], Any] = nullcontext, seconds: float = 0.6
) -> list[Any]:
    """Do one thing over and over on a thread, in a block, and another one here; return what went wrong there."""
    wrong: list[Any] = []
    over = threading.Event()

    def loop() -> None:
        with around():
            while not over.is_set():
                try:
                    found = work()
                except BaseException as error:
                    found = repr(error)
                if found is not None:
                    wrong.append(found)

    threads = [threading.Thread(target=loop)]
    threading.Timer(seconds, over.set).start()
    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-6)  # So that threads meet each other in the midst of everything.
        for thread in threads:
            thread.start()
        while not over.is_set():
            other()
    finally:
        over.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
    return wrong


@pytest.mark.parametrize("site", ["W:param", "W/matmul", "/softmax"])
def test_a_block_that_comes_and_goes_does_not_disturb_the_block_of_another_thread(site: str) -> None:
    model, x = Busy(), torch.ones(3, 4)

    def work() -> str | None:
        output = model(x)
        return None if output.item() == 0 else f"{output.item()} is not edited"

    def come_and_go() -> None:
        with hl.capture(model, site):
            pass

    assert not beside(work, come_and_go, lambda: hl.edit(model, site, lambda value: value * 0))


def test_hooks_at_functions_that_come_and_go_never_act_on_the_module_itself() -> None:
    model, x = Busy(), torch.ones(3, 4)
    shapes: set[tuple[int, ...]] = set()

    def see(value: Tensor) -> None:
        shapes.add(tuple(value.shape))

    def come_and_go() -> None:
        hooks = hl.Hooks(model)
        hooks.edit("/softmax", see)
        hooks.remove()

    assert not beside(lambda: model(x) and None, come_and_go)
    assert shapes <= {(3, 7)}


def test_a_hooked_callable_still_tells_what_is_noted_on_it() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = functools.partial(F.leaky_relu, negative_slope=0.1)

        def helper(self, x: Tensor) -> Tensor:
            return x

        helper.flag = 3  # type: ignore[attr-defined]

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.helper(x)) * self.act.keywords["negative_slope"] * self.helper.flag  # type: ignore[attr-defined]

    model, x = Asks(), torch.randn(3)
    assert hl.run(model, x, capture=["act()", "helper()"])[0].equal(model(x))


@pytest.mark.parametrize(
    ("site", "run"),
    [
        ("/sub", lambda x: 1 - x), ("/div", lambda x: 1 / x), ("/pow", lambda x: 1**x), ("/remainder", lambda x: 1 % x),
        ("/floor_divide", lambda x: 1 // x),
    ],
)  # fmt: skip
def test_an_operator_with_a_number_on_its_left_has_its_sides_in_order(
    site: str, run: Callable[[Tensor], Tensor]
) -> None:
    model, x = Returns(run), torch.tensor([4.0, 2.0])
    output, acts = hl.run(model, x, capture=[f"{site}:inputs", site])
    assert output.equal(run(x))
    assert acts[site].equal(output)
    assert list(acts[f"{site}:inputs"]) in (["input", "other"], ["input", "exponent"])
    assert acts[f"{site}:inputs"]["input"] == 1
    assert hl.run(model, x, edit={f"{site}:input": lambda one: one + 1}).equal(BY_HAND[site](x))


BY_HAND: dict[str, Callable[[Tensor], Tensor]] = {
    "/sub": lambda x: 2 - x,
    "/div": lambda x: 2 / x,
    "/pow": lambda x: 2**x,
    "/remainder": lambda x: 2 % x,
    "/floor_divide": lambda x: 2 // x,
}


def test_a_function_that_ran_in_some_of_the_modules_that_a_pattern_means_is_not_missed_in_the_others() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Softmax(-1), nn.ReLU()), torch.randn(2, 3)
    _, acts = hl.run(model, x, capture="*/softmax")  # Warnings are errors here.
    assert list(acts) == ["1/softmax"]
    with pytest.warns(hl.HooklineWarning, match="'0/gelu' did not fire"):
        hl.run(model, x, capture="*/gelu")
