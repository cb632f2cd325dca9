"""Why a site has no value, as the error says that is raised when it is read; and why a module is not called."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from hookline._kernel import why_not_called
from tests.errors.wording import says


class Net(nn.Module):
    """A model with a layer that is not called, and one that may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.last = nn.Linear(2, 2), nn.Linear(2, 2), nn.Identity()

    def forward(self, x: Tensor, error: Exception | None = None) -> Tensor:
        x = self.first(x)
        if error is not None:
            raise error
        return self.last(x)


X = torch.ones(1, 2)


@contextlib.contextmanager
def kept(model: Net) -> Iterator[hl.Cache]:
    """Yield a cache that hooks outside of any block fill."""
    hooks = hl.Hooks(model)
    acts = hooks.capture("last", "unused")
    hooks.when_missing("ignore")
    yield acts
    hooks.remove()


def block(model: Net) -> hl.Hooks:
    return hl.capture(model, "last", "unused").when_missing("ignore")


def not_run(model: Net) -> None:
    with kept(model) as acts:
        acts["last"]


def not_called(model: Net) -> None:
    with kept(model) as acts:
        model(X)
        acts["unused"]


def failed_later(model: Net) -> None:
    with kept(model) as acts:
        model(X)
        with contextlib.suppress(ValueError):
            model(X, ValueError())
        acts["last"]


def over(model: Net) -> None:
    with block(model) as acts:
        pass
    acts["last"]


def over_after_a_failure(model: Net) -> None:
    with block(model) as acts:
        with contextlib.suppress(ValueError):
            model(X, ValueError())
    acts["last"]


def inactive(model: Net) -> None:
    hooks = hl.Hooks(model, active=False)
    hooks.capture("last")["last"]


def entered_again(model: Net) -> None:
    hooks = hl.Hooks(model, active=False)
    acts = hooks.capture("last")
    with hooks:
        model(X)
    with hooks:
        acts["last"]


def on_another_thread(model: Net) -> None:
    with block(model) as acts:
        thread = threading.Thread(target=model, args=(X,))
        thread.start()
        thread.join()
        acts["last"]


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (not_run, says("nothing has passed yet", "last")),
        (not_called, says("nothing has passed though the model ran", "unused")),
        (failed_later, says("nothing passed in the latest forward", "last")),
        (over, says("nothing passed and its block is over", "last") + ".*in it$"),
        (over_after_a_failure, says("nothing passed before the forward failed", "last")),
        (inactive, says("its hook is not active", "last")),
        (entered_again, says("in this block", "last")),
        (on_another_thread, "contextvars.copy_context"),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
@pytest.mark.filterwarnings("ignore::hookline.HooklineWarning")
def test_a_site_without_a_value_says_the_reason_that_is_known(read: Callable[[Net], None], said: str) -> None:
    with pytest.raises(hl.NotCaptured, match=said):
        read(Net())


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_hooks_of_the_process_that_was_forked_say_so() -> None:
    model = Net()
    with kept(model) as acts:
        child = os.fork()
        if child == 0:
            try:
                acts["last"]
            except hl.NotCaptured as error:
                os._exit("this process was forked from the one that placed the hooks" not in str(error))
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0


def test_a_gradient_that_can_not_come_has_a_reason() -> None:
    class Ids(nn.Module):
        def forward(self, ids: Tensor) -> Tensor | str:
            return ids if ids.dim() else "text"

    model = nn.Sequential(Ids(), nn.Embedding(3, 2))
    model[1].requires_grad_(False)
    for site, ids, grad, said in [
        ("0", torch.tensor([1]), True, r"torch\.int64 values have none"),
        ("1", torch.tensor([1]), True, r"hl\.edit\(model, '.*', torch\.Tensor\.requires_grad_\)"),
        ("1", torch.tensor([1]), False, r"torch\.no_grad is on; run the model outside it"),
    ]:
        hooks = hl.Hooks(model)
        acts = hooks.capture(f"{site}:grad_output")
        hooks.when_missing("ignore")
        with torch.set_grad_enabled(grad):
            model(ids)
        with pytest.raises(hl.NotCaptured, match=said):
            acts[f"{site}:grad_output"]
        hooks.remove()
    hooks = hl.Hooks(part := model[0])
    acts = hooks.capture(":grad_output")
    hooks.when_missing("ignore")
    part(torch.tensor(1))
    with pytest.raises(hl.NotCaptured, match=says("no tensor passes here")):
        acts[":grad_output"]
    hooks.remove()


@pytest.mark.parametrize("error", [hl.StopForward, ValueError])
def test_a_block_that_failed_is_named_by_its_error(error: type[Exception]) -> None:
    model = Net()
    with contextlib.suppress(error), hl.capture(model, "last") as acts:
        model(X, error())
    with pytest.raises(hl.NotCaptured, match=says("nothing passed before", "last", error.__name__)):
        acts["last"]


def test_a_module_that_is_not_called_has_a_reason_where_the_model_shows_one() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2), "layer": nn.Linear(2, 2)})
    attention = model["attention"]
    assert "reads its weight directly" in why_not_called("attention.out_proj", attention.out_proj, model)
    assert "replaced by another Linear while hooked. Make the hooks again." in why_not_called(
        "layer", nn.Linear(2, 2), model
    )
    assert "taken out of the model while hooked" in why_not_called("gone", nn.Linear(2, 2), model)
    assert why_not_called("layer", model["layer"], model) == ""
