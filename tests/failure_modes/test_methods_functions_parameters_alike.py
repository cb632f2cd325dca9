"""Tests for methods, functions and parameters alike: threads, tasks, failures, recomputation, DDP and FSDP2."""

from __future__ import annotations

import asyncio
import copy
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import hookline as hl
from tests.errors.wording import says
from tests.support.models import AttentionInMethods, Autoencoder, Returns, loss_of, tokens
from tests.support.running import elsewhere
from tests.support.states import state_of

SITES = ["decode()", "scale/mul", "scale/*", "scale:param"]


class Boom(Exception):
    """Raised on purpose by a model or a user's function."""


def scaled(model: Autoencoder, x: Tensor, factor: float) -> Tensor:
    """Return the output with the value at any of SITES scaled. The decoder has no bias, so all sites give the same."""
    return model.encode(x) @ model.W_dec.detach() * (2.0 * factor)


def double(value: Tensor) -> Tensor:
    return value * 2


def autoencoder() -> Autoencoder:
    model = Autoencoder()
    with torch.no_grad():
        model.b_dec.zero_()
    return model


@pytest.mark.parametrize("site", SITES)
def test_two_threads_with_blocks_on_one_member_do_not_see_each_other(site: str) -> None:
    model, x = autoencoder(), torch.randn(3, 4)
    before = state_of(model)
    both_open = threading.Barrier(3)

    def work(factor: float) -> bool:
        expected = scaled(model, x, factor)
        with hl.edit(model, site, lambda value: value * factor), hl.capture(model, site) as acts:
            both_open.wait(10)
            outputs = [model(x) for _ in range(20)]
            both_open.wait(10)
        assert len(acts) == 1
        return all(torch.allclose(output, expected) for output in outputs)

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(work, (1.0, 3.0, 5.0)))
    assert state_of(model) == before


@pytest.mark.parametrize("site", SITES)
def test_a_block_acts_on_its_thread_alone_and_hooks_that_are_kept_on_all(site: str) -> None:
    model, x = autoencoder(), torch.randn(3, 4)
    plain = model(x)
    with hl.patch(model, {site: 0.0}):
        assert torch.equal(elsewhere(model, x), plain)
        assert model(x).count_nonzero() == 0
    hooks = hl.Hooks(model)
    hooks.patch({site: 0.0})
    assert elsewhere(model, x).count_nonzero() == 0
    hooks.remove()
    assert torch.equal(elsewhere(model, x), plain)


@pytest.mark.parametrize("site", SITES)
def test_tasks_that_interleave_do_not_see_each_other(site: str) -> None:
    model, x = autoencoder(), torch.randn(3, 4)

    async def task(factor: float) -> Tensor:
        with hl.edit(model, site, lambda value: value * factor):
            await asyncio.sleep(0)
            output = model(x)
            await asyncio.sleep(0)
        return output

    async def main() -> list[Tensor]:
        return await asyncio.gather(*(task(factor) for factor in (1.0, 3.0, 5.0)))

    before = state_of(model)
    for factor, output in zip((1.0, 3.0, 5.0), asyncio.run(main()), strict=True):
        assert torch.allclose(output, scaled(model, x, factor))
    assert state_of(model) == before


def test_a_block_that_closes_while_another_thread_reads_the_parameter_does_not_disturb_it() -> None:
    entered, leave = threading.Event(), threading.Event()

    class Waiting(Autoencoder):
        def encode(self, x: Tensor) -> Tensor:
            entered.set()
            assert leave.wait(10)
            return super().encode(x)

    model, x = Waiting(), torch.randn(3, 4)
    with ThreadPoolExecutor(1) as pool:
        changes = {"W_enc:param": 0.0, "W_dec/matmul": 0.0, "encode()": 0.0}
        with pytest.raises(hl.NeverFired, match=says("ran on another thread")), hl.patch(model, changes):
            job = pool.submit(model, x)
            assert entered.wait(10)
        leave.set()
        assert torch.equal(job.result(), model(x))
    assert type(model) is Waiting


def test_many_blocks_that_come_and_go_on_many_threads_leave_the_class_as_it_was() -> None:
    model, x = autoencoder(), torch.randn(3, 4)
    before = state_of(model)

    def work(factor: float) -> bool:
        expected = scaled(model, x, factor)
        right = True
        for number in range(60):
            site = SITES[number % len(SITES)]
            with hl.edit(model, site, lambda value: value * factor), torch.no_grad():
                right = right and torch.allclose(model(x), expected)
        return right

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, (1.0, 2.0, 3.0, 4.0)))
    assert state_of(model) == before


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("site", [*SITES, "decode():input", "W_dec/matmul:grad_output"])
@pytest.mark.parametrize("raised_by", ["the model", "the edit", "the block"])
def test_a_failure_leaves_the_model_as_it_was_found(raised_by: str, site: str, error: type[BaseException]) -> None:
    class Failing(Autoencoder):
        def decode(self, features: Tensor) -> Tensor:
            output = super().decode(features)
            if raised_by == "the model":
                raise error
            return output

    def edit(value: Tensor) -> Tensor:
        if raised_by == "the edit":
            raise error
        return value

    model = Failing()
    before = state_of(model)
    with pytest.raises(error) as caught, hl.edit(model, site, edit), hl.capture(model, "encode()") as acts:
        model(torch.randn(3, 4)).sum().backward()
        raise error
    model.zero_grad()
    assert state_of(model) == before
    assert "encode()" in acts
    if raised_by == "the edit" and error is Boom and hasattr(caught.value, "add_note"):
        assert any(f"'{site.removesuffix('*')}" in note for note in caught.value.__notes__)


@pytest.mark.usefixtures("listening_to_ctrl_c")
@pytest.mark.parametrize("site", SITES)
def test_ctrl_c_at_a_member_leaves_the_model_as_it_was_found(site: str) -> None:
    model = autoencoder()
    before = state_of(model)

    def press_ctrl_c(_value: Tensor) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), hl.edit(model, site, press_ctrl_c):
        model(torch.randn(3, 4))
    assert state_of(model) == before


def test_a_hooks_that_is_dropped_takes_its_members_along() -> None:
    model, x = autoencoder(), torch.randn(3, 4)
    before, plain = state_of(model), model(x)
    hooks = hl.Hooks(model)
    hooks.patch(dict.fromkeys(SITES, 0.0))
    assert model(x).count_nonzero() == 0
    del hooks
    assert state_of(model) == before
    assert torch.equal(model(x), plain)


def test_what_was_captured_in_one_run_is_patched_into_another(tmp_path: Path) -> None:
    model, x = Autoencoder(), torch.randn(3, 4)
    clean, acts = hl.run(model, x, capture=["encode()", "b_dec/*", "W_dec:param", "W_enc/matmul", "scale/mul[0]"])
    acts.save(tmp_path / "acts.safetensors")
    loaded = hl.Cache.load(tmp_path / "acts.safetensors")
    assert list(loaded) == list(acts)
    for cache in (acts, loaded, acts.select("b_dec/*")):
        with hl.patch(model, cache):
            assert torch.equal(model(torch.randn(3, 4)), clean)


def test_an_edit_is_told_of_the_call_it_takes_part_in() -> None:
    model, x = Autoencoder(), torch.randn(3, 4)
    told: list[Any] = []
    for where in ("encode()", "b_dec/*", "W_dec:param"):
        with hl.edit(model, where, lambda value, call: told.append(call), with_call=True):
            model(x), model(x)
    assert [(str(call.site), call.number, len(call.args)) for call in told] == [
        ("encode()", 0, 1), ("encode()", 1, 1), *[("b_dec/sub#0", 0, 2), ("b_dec/add#0", 0, 2)] * 2,
        ("W_dec:param", 0, 0), ("W_dec:param", 1, 0),
    ]  # fmt: skip
    assert all(call.module is model for call in told)


@pytest.mark.parametrize("site", SITES)
def test_an_edit_that_runs_the_model_again_is_not_seen_by_any_hook(site: str) -> None:
    model, x = autoencoder(), torch.randn(3, 4)
    plain = model(x)
    inner: list[Tensor] = []

    def run_again(value: Tensor) -> Tensor:
        inner.append(model(x))
        return value * 2

    with hl.edit(model, site, run_again), hl.capture(model, site, keep="all") as acts:
        assert torch.allclose(model(x), plain * 2)
    assert [torch.equal(output, plain) for output in inner] == [True]
    assert [len(acts.calls(key)) for key in acts] == [1]


class Recomputed(AttentionInMethods):
    """Runs its forward in a checkpoint."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("site", ["pattern()", "split_heads()#1", 'pattern():inputs["key"]'])
@pytest.mark.parametrize("closed", [False, True])
def test_an_edit_of_a_method_is_replayed_when_checkpointing_runs_it_again(
    closed: bool, site: str, reentrant: bool
) -> None:
    model, x = Recomputed(), tokens().requires_grad_()
    model.reentrant = reentrant
    bare = AttentionInMethods()
    bare.load_state_dict(model.state_dict())
    with hl.edit(bare, site, lambda value: value * 3):
        expected = torch.autograd.grad(loss_of(bare(x)), [x, *bare.parameters()])
    with hl.edit(model, site, lambda value: value * 3), hl.capture(model, "pattern()", keep="all") as acts:
        loss = loss_of(model(x))
        if not closed:
            loss.backward()
    if closed:
        loss.backward()
    assert len(acts.calls("pattern()")) == 1
    torch.testing.assert_close([x.grad, *(one.grad for one in model.parameters())], list(expected))


class Fused(Autoencoder):
    """One operation takes two parameters; the backward runs the forward again."""

    recomputes = True

    def encode(self, x: Tensor) -> Tensor:
        return torch.addmm(self.b_enc, x, self.W_enc).relu()

    def forward(self, x: Tensor) -> Tensor:
        forward = super().forward
        return checkpoint(forward, x, use_reentrant=False) if self.recomputes else forward(x)


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("seen", ["b_enc/*", "W_enc/*", "encode()", "b_enc:param"])
def test_changes_are_replayed_also_where_others_look_on_at_the_same_place(seen: str, closed: bool) -> None:
    model, x = Fused(), torch.randn(3, 4, requires_grad=True)

    def gradients() -> list[Tensor]:
        watch, change = hl.capture(model, seen), hl.edit(model, ["W_enc/addmm", "W_dec:param"], double)
        with watch, change, hl.edit(model, "decode():input", double):
            loss = loss_of(model(x))
            if not closed:
                loss.backward()
        if closed:
            loss.backward()
        found = [x.grad, *(parameter.grad for parameter in model.parameters())]
        x.grad = None
        model.zero_grad()
        return found

    found = gradients()
    model.recomputes = False
    torch.testing.assert_close(found, gradients())


class Parts(nn.Module):
    """A model for tests of data and tensor parallelism, with methods, bare parameters and layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.W = nn.Parameter(torch.randn(4, 4))
        self.sae = Autoencoder()

    def mix(self, x: Tensor) -> Tensor:
        return self.body(x) @ self.W

    def forward(self, x: Tensor) -> Tensor:
        return self.sae(self.mix(x))


EVERYWHERE = ("mix()", "sae.encode()", "W/matmul", "W:param", "body.weight:param", "sae.W_enc/*", "mix():grad_output")


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp2(model: nn.Module) -> nn.Module:
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("needs torch 2.6, for torch.distributed.fsdp.fully_shard")
    fsdp.fully_shard(model.sae)
    fsdp.fully_shard(model)
    return model


def gradients_of(model: nn.Module) -> list[Tensor]:
    found = [parameter.grad for parameter in model.parameters()]
    return [one.full_tensor() if hasattr(one, "full_tensor") else one for one in found]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("wrap", [ddp, fsdp2])
def test_models_spread_over_processes_are_seen_and_changed_as_the_bare_one(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    bare, x = Parts(), torch.randn(3, 4)
    model = wrap(copy.deepcopy(bare))
    kinds = [type(module) for module in model.modules()]

    def run(target: nn.Module, make: Callable[[nn.Module], hl.Hooks]) -> tuple[dict[str, Any], Tensor, list[Tensor]]:
        target.zero_grad()
        with make(target) as acts:
            output = target(x)
            output.sum().backward()
        return dict(acts), output, gradients_of(target)

    for make in (
        lambda target: hl.capture(target, *EVERYWHERE),
        lambda target: hl.patch(target, {"body.weight:param[0]": 1.0}),
        lambda target: hl.edit(target, ["W:param", "sae.encode()", "sae.W_dec/matmul"], double),
    ):
        expected, found = run(bare, make), run(model, make)
        assert list(found[0]) == list(expected[0])
        for site, value in expected[0].items():
            assert torch.equal(found[0][site], value), site
        assert torch.allclose(found[1], expected[1])
        torch.testing.assert_close(found[2], expected[2])
        assert [type(module) for module in model.modules()] == kinds


class Checkpoints(nn.Module):
    """Passes its bound method, or its child's bound forward, to checkpoint."""

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
    """Has a function and a parameter to hook, and returns one number."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.ones(4, 7))

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(x @ self.W, dim=-1).sum()[None] * (x @ self.W).sum()


def beside(
    work: Callable[[], Any], other: Callable[[], Any], around: Callable[[], Any] = nullcontext, seconds: float = 0.6
) -> list[Any]:
    """Repeat `work` on a thread, inside `around()`, while `other` repeats here; return the failures of `work`."""
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
        sys.setswitchinterval(1e-6)  # Let Python switch threads at any moment.
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
    _, acts = hl.run(model, x, capture="*/softmax")  # A warning would be an error here.
    assert list(acts) == ["1/softmax"]
    with pytest.warns(hl.HooklineWarning, match=says("did not fire", "0/gelu")):
        hl.run(model, x, capture="*/gelu")
