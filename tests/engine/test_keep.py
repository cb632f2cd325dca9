"""The options of a capture, and what `Save` makes of them."""

from __future__ import annotations

import inspect

import torch

import hookline as hl
from hookline._engine.keep import CaptureOptions, Save


def test_the_options_of_a_capture_have_the_defaults_of_its_signature() -> None:
    declared = inspect.signature(hl.Hooks.capture).parameters
    assert {name: declared[name].default for name in CaptureOptions._fields} == CaptureOptions()._asdict()


def test_a_capture_tells_the_options_that_are_not_usual() -> None:
    assert repr(Save()) == "save()"
    assert repr(Save(CaptureOptions(clone=True, dtype=torch.float16))) == "save(clone=True, dtype=torch.float16)"
