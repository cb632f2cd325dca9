"""A few hundred random models and programs of hooks, compared with the oracle. `make fuzz` runs many more."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.properties import properties
from tests.properties.fuzz import Check, problem_of, quiet
from tests.properties.random_models import COMPOSITE, LEAF, random_model
from tests.properties.steps import STEPS

CHUNK = 50
sources = st.randoms(use_true_random=False)
drawn = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


@pytest.mark.parametrize("chunk", range(6))
def test_any_program_on_any_model_gives_what_the_oracle_gives(chunk: int) -> None:
    _check_chunk(chunk, properties.agrees_with_the_oracle)


@pytest.mark.parametrize("chunk", range(4))
def test_containers_and_tensors_that_modules_get_are_the_objects_that_were_given(chunk: int) -> None:
    _check_chunk(chunk, properties.containers_agree_with_the_oracle)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(7))
def test_hooks_on_methods_functions_and_parameters_give_what_the_oracle_gives(chunk: int) -> None:
    _check_chunk(chunk, properties.members_agree_with_the_oracle)


@drawn
@given(sources)
def test_what_hypothesis_draws_gives_what_the_oracle_gives(source: random.Random) -> None:
    assert not properties.agrees_with_the_oracle(source)


@drawn
@given(sources)
def test_patching_a_value_with_itself_changes_nothing(source: random.Random) -> None:
    assert not properties.patched_with_itself_nothing_changes(source)


@drawn
@given(sources)
def test_blocks_on_two_threads_or_tasks_do_not_see_each_other(source: random.Random) -> None:
    assert not properties.contexts_do_not_see_each_other(source)


@drawn
@given(sources)
def test_a_trial_run_lists_sites_in_the_order_in_which_they_run(source: random.Random) -> None:
    assert not properties.sites_are_listed_as_they_run(source)


def test_the_models_are_of_every_kind() -> None:
    kinds = {kind for seed in range(600) for kind in random_model(random.Random(seed)).body.kinds()}
    assert kinds == {*LEAF, *COMPOSITE, "shared"}
    kinds = {kind for seed in range(600) for kind in random_model(random.Random(seed), scripts=True).body.kinds()}
    assert kinds == {*LEAF, *COMPOSITE, *STEPS, "shared", "script"}


def _check_chunk(chunk: int, check: Check) -> None:
    seeds = range(chunk * CHUNK, (chunk + 1) * CHUNK)
    found = {seed: problem for seed in seeds if (problem := problem_of(seed, check))}
    assert not found, "\n".join(f"seed {seed}: {problem}" for seed, problem in found.items())
