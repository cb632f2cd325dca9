"""On a CUDA device: a watch records on the device, reads once per pass, and still knows which value was bad first."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from tests.errors.wording import says

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]
NAN = float("nan")


class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)

    def forward(self, x):
        return torch.sqrt(self.first(x)) * 2


class Net(nn.Module):
    def __init__(self, again=False):
        super().__init__()
        self.a, self.drop, self.root, self.b = nn.Linear(16, 16), nn.Dropout(0.1), Root(), nn.Linear(16, 4)
        self.again = again

    def forward(self, x):
        x = self.drop(self.a(x))
        return self.b(checkpoint(self.root, x, use_reentrant=False) if self.again else self.root(x))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).cuda()


def positive(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.abs_()
    return model.cuda()


def x() -> torch.Tensor:
    return torch.rand(8, 16, device="cuda")


class Syncs:
    """Counts how often Python waits for the device, from torch's warnings."""

    def __enter__(self):
        import warnings

        self._caught = warnings.catch_warnings(record=True)
        self.said = self._caught.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *details):
        torch.cuda.set_sync_debug_mode("default")
        self._caught.__exit__(*details)
        self.count = sum("called a synchronizing" in str(one.message) for one in self.said)


def test_a_pass_waits_for_the_device_a_few_times_however_many_modules_there_are():
    counts = {}
    for depth in (2, 40):
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(depth))).cuda()
        with hl.watch(model):
            given = x()
            model(given).sum().backward()
            with Syncs() as syncs:
                model(given).sum().backward()
            counts[depth] = syncs.count
    assert counts[2] == counts[40] <= 4


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("trains", [False, True])
def test_a_bad_forward_is_seen_again_with_what_went_in_and_the_function(again, trains):
    model = positive(Net(again))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with pytest.raises(hl.BadValue) as raised:
        with hl.watch(model):
            for number in range(4):
                given = x() if number < 3 else -x() * 9
                if trains:
                    optimizer.zero_grad()
                    model(given).sum().backward()
                    optimizer.step()
                else:
                    with torch.no_grad():
                        model(given)
    error = raised.value
    assert (str(error.site), str(error.function)) == ("root", "root/sqrt#0")
    assert error.forward == error.step == 3  # Without training, each forward is a step.
    assert error.inputs['root:inputs["x"]'].is_cuda
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_a_bad_input_is_told_as_such():
    model = mlp()
    with torch.no_grad(), pytest.raises(hl.BadValue, match=says("It came in with the arguments")):
        with hl.watch(model):
            model(x() * NAN)


def test_a_bad_gradient_is_the_first_of_the_backward():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x):
            return self.b(torch.sqrt(self.a(x) * 0))

    model = Halves().cuda()
    with pytest.raises(hl.BadValue) as raised:
        with hl.watch(model):
            model(x()).sum().backward()
    assert (str(raised.value.site), raised.value.backward) == ("a:grad_output", True)


def test_a_bad_gradient_of_a_parameter_is_found_before_the_optimizer_takes_it():
    model = mlp()
    model[0].weight.register_hook(lambda gradient: gradient * NAN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(hl.BadValue, match=says("has a gradient with NaN", "0.weight:param")):
        with hl.watch(model):
            model(x()).sum().backward()
            optimizer.step()
    assert model[0].weight.isfinite().all()


def test_autocast_in_float16_with_a_scaler_trains_on_and_without_it_is_told():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**30)
    with hl.watch(model, scaler=scaler) as watch:
        for _ in range(30):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(x()).float().sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert 0 < watch.steps < 30
    with pytest.raises(hl.BadValue):
        with hl.watch(model), torch.autocast("cuda", dtype=torch.float16):
            (model(x()).float().sum() * 2.0**30).backward()


def test_an_overflow_of_float16_in_the_forward_is_told_in_the_same_autocast():
    model = mlp()
    with torch.no_grad(), pytest.raises(hl.BadValue, match=says("float16 ends at", "65,504")):
        with hl.watch(model), torch.autocast("cuda", dtype=torch.float16):
            model[0].weight.fill_(1e4)
            model(x())


# Torch warns about the first graph, which it captures to warm up, for any model.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_compiled_model_is_read_after_its_forward_and_seen_again_uncompiled(mode):
    torch._dynamo.reset()
    model = positive(Net()).eval()
    compiled = torch.compile(model, mode=mode)
    with torch.no_grad(), pytest.raises(hl.BadValue) as raised:
        with hl.watch(compiled):
            for _ in range(4):
                compiled(x())
            compiled(-x() * 9)
    assert (str(raised.value.function), raised.value.step) == ("root/sqrt#0", 4)
    torch._dynamo.reset()


def test_a_compiled_training_step_is_stopped_before_the_optimizer():
    torch._dynamo.reset()
    model = mlp()
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with pytest.raises(hl.BadValue):
        with hl.watch(compiled):
            for factor in (1, 1, NAN):
                optimizer.zero_grad()
                compiled(x() * factor).sum().backward()
                optimizer.step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    torch._dynamo.reset()


def test_values_on_another_stream_are_seen():
    model, stream = mlp(), torch.cuda.Stream()
    model[2].weight.data[0, 0] = NAN
    with torch.no_grad(), pytest.raises(hl.BadValue, match="'2' gave NaN"):
        with hl.watch(model):
            given = x()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                model(given)


def test_a_watch_holds_no_activations():
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16))).cuda()
    given = torch.rand(4096, 1024, device="cuda")

    def peak(watched):
        with torch.no_grad(), hl.watch(model) if watched else torch.no_grad():
            model(given)
            torch.cuda.reset_peak_memory_stats()
            model(given)
            return torch.cuda.max_memory_allocated()

    bare = peak(False)
    assert peak(True) - bare <= given.nbytes + 2**20  # A watch keeps the last value: a parent may return it.


def test_statistics_are_those_of_the_cpu():
    torch.manual_seed(0)
    there = mlp()
    here = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    here.load_state_dict(there.state_dict())
    given, found = torch.rand(8, 16), []
    for model, batch in ((here, given), (there, given.cuda())):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hl.watch(model, every=2) as watch:
            for _ in range(3):
                optimizer.zero_grad()
                model(batch).square().sum().backward()
                optimizer.step()
        found.append({site: [one.item() for one in watch.log.calls(site)] for site in watch.log})
    assert set(found[0]) == set(found[1])
    for site, numbers in found[0].items():
        assert found[1][site] == pytest.approx(numbers, rel=1e-3, abs=1e-5), site
