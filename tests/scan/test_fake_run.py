"""A run on fake tensors, or a real run where they do not suffice, leaves the model unchanged."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from tests.support.models import GPT, tokens
from tests.support.scan_models import FAKE, REAL, DataDependent, Stateful
from tests.support.states import state_of


def test_a_model_that_looks_at_its_values_is_run_for_real_and_the_note_says_so() -> None:
    torch.manual_seed(0)
    model, x = DataDependent(), tokens()
    scan = hl.scan(model, x)
    assert scan.note.startswith(REAL)
    assert "DataDependent" in scan.note
    assert scan["b"].calls == 1
    assert scan["c"].calls == 0
    assert scan["norm"].shape == "(2, 5, 8)"
    assert repr(scan).startswith(REAL)


@pytest.mark.parametrize("training", [True, False])
def test_the_real_run_leaves_no_mark(training: bool) -> None:
    model, x = DataDependent().train(training), tokens()
    before, numbers = state_of(model), {name: value.clone() for name, value in model.state_dict().items()}
    random, given = torch.get_rng_state(), x.clone()
    hl.scan(model, x)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(x, given)
    assert state_of(model) == before
    assert all(torch.equal(value, numbers[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("look", [False, True], ids=["fake", "real"])
def test_a_model_that_writes_on_itself_is_put_back(look: bool) -> None:
    model, x = Stateful(look), tokens()
    given, random = x.clone(), torch.get_rng_state()
    before = state_of(model)
    numbers = {name: value.clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}
    assert hl.scan(model, x).note.startswith(REAL if look else FAKE)
    assert torch.equal(x, given)
    assert torch.equal(torch.get_rng_state(), random)
    assert (model.counted, model.seen, model.by_name) == (0, [], {})
    assert not hasattr(model, "last")
    assert torch.equal(model.scale, torch.ones(8))
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        assert torch.equal(value, numbers[name]), name
    assert state_of(model) == before
    model(x)
    assert not any(type(value).__name__ == "FakeTensor" for value in [model.last, *model.seen, model.scale])


def test_a_model_that_fails_raises_its_own_error_and_is_put_back() -> None:
    model, x = GPT(depth=2), tokens()
    before, random = state_of(model), torch.get_rng_state()
    with pytest.raises(RuntimeError, match="normalized_shape"):
        hl.scan(model, x[..., :3])
    with pytest.raises(TypeError, match="nonsense"):
        hl.scan(model, x, nonsense=1)
    assert state_of(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    with pytest.raises(hl.HooklineError, match="takes a model"):
        hl.scan(tokens())  # type: ignore[arg-type]


def test_the_fall_back_says_nothing_on_the_error_stream(capfd: pytest.CaptureFixture[str]) -> None:
    class Refused(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch._grouped_mm(x, x.transpose(-1, -2).contiguous())

    scan = hl.scan(Refused(), torch.randn(2, 16, 16))
    assert scan.note.startswith(REAL)
    hl.scan(DataDependent(), tokens())
    assert capfd.readouterr() == ("", "")
