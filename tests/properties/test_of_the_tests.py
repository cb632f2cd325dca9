"""A test of the tests: the properties must notice each of many ways to break the core."""

from __future__ import annotations

import pytest

from tests.properties import mutations_of_members  # noqa: F401  # Registers its mutations.
from tests.properties.fuzz import problem_of, quiet
from tests.properties.mutations import MUTATIONS, Mutation
from tests.properties.properties import PROPERTIES

SEEDS = 800
# Errors of a mutation that no longer fits the core. These do not count as noticed.
ACCIDENTS = ("the case itself failed", "TypeError", "AttributeError", "NameError")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_broken_core_is_noticed(mutation: Mutation) -> None:
    check, _ = PROPERTIES[mutation.caught_by]
    with quiet():
        for seed in (mutation.seed, *range(SEEDS)):
            with mutation.apply():
                problem = problem_of(seed, check)
            assert not any(accident in problem for accident in ACCIDENTS), problem
            if problem and not problem_of(seed, check):
                return
    pytest.fail(f"none of {SEEDS} cases shows that {mutation.name}")
