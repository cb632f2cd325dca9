"""Hooks that are not kept, or whose block is never entered: they do nothing, and a warning says so."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import mlp
from tests.support.quick_python import run_forked
from tests.support.running import environment, said

SHORT_FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "capture": lambda model: hl.capture(model, "0", "1"),
    "patch": lambda model: hl.patch(model, {"0": 0.0, "1": 0.0}),
    "edit": lambda model: hl.edit(model, ["0", "1"], torch.zeros_like),
    "skip": lambda model: hl.skip(model, ["0", "1"]),
}


@pytest.mark.parametrize("verb", SHORT_FORMS)
def test_a_short_form_that_is_never_entered_says_that_it_did_nothing(verb: str) -> None:
    model = mlp()
    message = rf"hl\.{verb} at '0' and 1 more, made in test_hooks_never_entered.py:[0-9]+, was never entered"
    message += rf".*`with hl\.{verb}\(.*hl\.Hooks\(model\).*\.{verb}\("
    with pytest.warns(hl.HooklineWarning, match=message) as found:
        SHORT_FORMS[verb](model)
    assert [one.filename for one in found] == [__file__]


def test_a_watch_that_is_never_entered_says_that_it_did_nothing() -> None:
    model = mlp()
    with pytest.warns(hl.HooklineWarning, match=says("was never entered")) as found:
        hl.watch(model)
        gc.collect()
    assert len(found) == 1
    assert "hl.Hooks" not in str(found[0].message)


@pytest.mark.parametrize("verb", SHORT_FORMS)
def test_a_short_form_that_was_entered_says_nothing_when_it_goes(verb: str) -> None:
    model = mlp()

    def enter() -> None:
        block = SHORT_FORMS[verb](model)
        with block.when_missing("ignore"):
            pass
        del block
        gc.collect()

    assert said(enter) == []


def test_a_part_of_a_short_form_may_be_entered_instead() -> None:
    model = mlp()

    def enter() -> None:
        with hl.patch(model, {"0": 0.0, "2": 0.0}).at("0"):
            model(torch.ones(1, 4))

    assert said(enter) == []


def test_a_short_form_that_could_not_be_made_says_nothing_more() -> None:
    model = mlp()

    def fail() -> None:
        with pytest.raises(hl.SiteError):
            hl.patch(model, {"0": 0.0, "no": 0.0})
        with pytest.raises(hl.HooklineError):
            hl.capture(model, "0").when_missing("perhaps")
        with pytest.raises(hl.SiteError):
            hl.capture(model, "0")["0"]
        gc.collect()

    assert said(fail) == []


def test_what_hookline_makes_for_itself_says_nothing() -> None:
    model = mlp()

    def use() -> None:
        with pytest.raises(hl.SiteError):
            hl.run(model, torch.ones(1, 4), patch={"0": 0.0}, capture="no")
        hl.run(model, torch.ones(1, 4), patch={"0": 0.0}, capture="2")
        hl.sweep(model, "*", lambda: model(torch.ones(1, 4)).sum(), progress=False)
        gc.collect()

    assert said(use) == []


PROGRAM = """
import torch, hookline as hl
model = torch.nn.Sequential(torch.nn.ReLU())
"""


def said_by(program: str, check: bool = True) -> str:
    """Return the stderr of a program run in a separate process."""
    done = run_forked(PROGRAM + program)
    assert (done.returncode == 0) == check, done.stderr
    return done.stderr


@pytest.mark.process
def test_a_plain_python_warns_at_its_end_too() -> None:
    command = [sys.executable, "-c", PROGRAM + "kept = hl.patch(model, {'0': 0.0})"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True, timeout=300)
    assert "hl.patch at '0', made in <string>:4, was never entered" in done.stderr


@pytest.mark.process
def test_a_short_form_that_a_variable_holds_until_the_end_of_python_is_told_of_there() -> None:
    told = said_by("kept = hl.patch(model, {'0': 0.0}); also = hl.capture(model, '0'); watch = hl.watch(model)")
    assert told.count("was never entered and did nothing") == 3
    assert "hl.patch at '0', made in <string>:4, was never entered" in told


@pytest.mark.process
def test_the_end_of_python_is_no_reason_to_warn_of_anything_else() -> None:
    used = "kept = hl.patch(model, {'0': 0.0})\nwith kept: model(torch.ones(1))\n"
    assert said_by(used + "seen = hl.capture(model, '0'); repr(seen)") == ""
    assert said_by("kept = hl.Hooks(model).patch({'0': 0.0})") == ""


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_that_ends_does_not_warn_of_short_forms_that_its_parent_will_enter() -> None:
    fork = "if os.fork() == 0: raise SystemExit\nos.wait()\n"
    assert said_by("import os; kept = hl.capture(model, '0')\n" + fork + "with kept: model(torch.ones(1))") == ""


@pytest.mark.process
def test_a_program_that_failed_says_nothing_of_short_forms_that_it_did_not_get_to() -> None:
    told = said_by("kept = hl.capture(model, '0'); int('x')", check=False)
    assert "invalid literal" in told
    assert "never entered" not in told


ADDED: dict[str, Callable[[hl.Hooks], Any]] = {
    "capture": lambda hooks: hooks.capture("0", "1"),
    "patch": lambda hooks: hooks.patch({"0": 0.0, "1": 0.0}),
    "edit": lambda hooks: hooks.edit(["0", "1"], torch.zeros_like),
    "skip": lambda hooks: hooks.skip(["0", "1"]),
}


def test_hooks_that_nobody_keeps_say_that_they_are_gone_already() -> None:
    model = mlp()
    with pytest.warns(
        hl.HooklineWarning, match=says("were gone before the model", "0", 1, "hooks = hl.Hooks(model)")
    ) as found:
        hl.Hooks(model).edit(["0", "1"], torch.zeros_like)
        hl.Hooks(model).patch({"0": 0.0, "1": 0.0})
        hl.Hooks(model).skip(["0", "1"])
        acts = hl.Hooks(model).capture("0", "1")
    assert [one.filename for one in found] == 4 * [__file__]
    assert not len(acts)


@pytest.mark.parametrize("verb", ADDED)
def test_hooks_that_were_kept_may_go_at_any_time(verb: str) -> None:
    model = mlp()

    def keep() -> None:
        for _ in range(2):  # Like a notebook cell that runs twice.
            hooks = hl.Hooks(model)
            ADDED[verb](hooks)
        del hooks
        hooks = hl.Hooks(model)
        ADDED[verb](hooks)
        hooks.remove()

    assert said(keep) == []


def test_hooks_that_are_used_where_they_are_made_say_nothing() -> None:
    model = mlp()

    def use() -> None:
        hl.Hooks(model).edit("0", torch.zeros_like).run(torch.ones(1, 4))
        with hl.Hooks(model).edit("0", torch.zeros_like): pass  # noqa: E701  # fmt: skip
        hl.Hooks(model, active=False).edit("0", torch.zeros_like)

    assert said(use) == []


CHANGES = [verb for verb in ADDED if verb != "capture"]


def make(model: nn.Module, verb: str) -> None:
    hooks = hl.Hooks(model)
    ADDED[verb](hooks)


@pytest.mark.parametrize("verb", CHANGES)
def test_changes_that_a_function_makes_and_does_not_return_say_that_they_are_gone(verb: str) -> None:
    model = mlp()
    message = says("the hooks at", "0", 1)
    with pytest.warns(hl.HooklineWarning, match=message) as found:
        make(model, verb)
        model(torch.ones(1, 4))
    assert [one.filename for one in found] == [__file__]


def test_hooks_of_a_function_that_were_used_or_let_go_on_purpose_say_nothing() -> None:
    model = mlp()

    def used() -> None:
        hooks = hl.Hooks(model)
        hooks.edit("0", torch.zeros_like)
        model(torch.ones(1, 4))

    def used_in_part() -> None:
        hooks = hl.Hooks(model)
        hooks.edit("0", torch.zeros_like)
        model[0](torch.ones(1, 4))

    def removed() -> None:
        hooks = hl.Hooks(model)
        hooks.edit("0", torch.zeros_like)
        hooks.remove()

    def cleared() -> None:
        hooks = hl.Hooks(model)
        hooks.edit("0", torch.zeros_like)
        hl.clear(model)

    def resting() -> None:
        hooks = hl.Hooks(model)
        hooks.edit("0", torch.zeros_like)
        hooks.deactivate()

    def entered() -> None:
        hooks = hl.Hooks(model)
        hooks.edit("0", torch.zeros_like)
        with hooks:
            pass

    def ignored() -> None:
        hooks = hl.Hooks(model)
        hooks.edit("0", torch.zeros_like).when_missing("ignore")

    def failed() -> None:
        hooks = hl.Hooks(model)
        hooks.edit("0", torch.zeros_like)
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 5))

    for run in (
        used,
        used_in_part,
        removed,
        cleared,
        resting,
        entered,
        ignored,
        failed,
        lambda: make(model, "capture"),
    ):
        assert said(run) == []


def test_a_cell_of_a_notebook_that_is_run_twice_keeps_its_hooks() -> None:
    names = {"hl": hl, "model": mlp(), "torch": torch}
    cell = "hooks = hl.Hooks(model).edit('0', torch.zeros_like)"
    found = said(lambda: [exec(compile(cell, "cell", "exec"), names) for _ in range(2)])
    assert not any("nothing holds them" in one for one in found), found
    del names["hooks"]


def test_hooks_that_a_loop_makes_again_were_kept() -> None:
    model = mlp()

    def loop() -> None:
        for _ in range(3):
            hooks = hl.Hooks(model).edit("0", torch.zeros_like)
            model[2](torch.ones(1, 8))  # A module without hooks.
        hooks.remove()

    found = said(loop)
    assert not any("nothing holds them" in one for one in found), found


def test_a_short_form_that_is_looked_at_need_not_be_entered() -> None:
    model = mlp()
    assert said(lambda: len(hl.capture(model, "*"))) == []
    assert said(lambda: repr(hl.patch(model, {"0": 0.0}))) == []
    assert said(lambda: [hook.site for hook in hl.edit(model, "*", torch.zeros_like)]) == []
