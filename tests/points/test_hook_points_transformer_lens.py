"""With transformer_lens installed, points and hooked models are instances of its classes and give its values."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.points import hook_points
from tests.support.points_models import AutoEncoder, add_one
from tests.support.quick_python import run_forked

transformer_lens = pytest.importorskip("transformer_lens")

from transformer_lens import HookedRootModule  # noqa: E402
from transformer_lens.hook_points import HookPoint  # noqa: E402


@pytest.fixture(autouse=True)
def kind_of_points():
    """Here the points are always those of transformer_lens."""
    hook_points.as_point.cache_clear()
    hook_points.as_root.cache_clear()


class Written(HookedRootModule):
    """A model that its author wrote for transformer_lens, with a point at every place."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 6), nn.Linear(6, 3)
        self.W = nn.Parameter(torch.randn(3, 3))
        self.hook_fc1, self.hook_relu, self.hook_fc2, self.hook_W, self.hook_out = (HookPoint() for _ in range(5))
        self.setup()

    def forward(self, x):
        hidden = self.hook_relu(self.hook_fc1(self.fc1(x)).relu())
        return self.hook_out(self.hook_W(self.hook_fc2(self.fc2(hidden)) @ self.W).square().mean())


class Plain(nn.Module):
    """The same model without hook points, by an author who does not use transformer_lens."""

    def __init__(self, written: Written) -> None:
        super().__init__()
        self.fc1, self.relu, self.fc2 = copy.deepcopy(written.fc1), nn.ReLU(), copy.deepcopy(written.fc2)
        self.W = copy.deepcopy(written.W)

    def forward(self, x):
        return (self.fc2(self.relu(self.fc1(x))) @ self.W).square().mean()


class Half(nn.Module):
    """A model with one point of transformer_lens in it."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.relu_hook = HookPoint()

    def forward(self, x):
        return self.relu_hook(self.fc(x).relu()) * 2


SAME = {
    "hook_fc1": "fc1.hook_point",
    "hook_relu": "relu.hook_point",
    "hook_fc2": "fc2.hook_point",
    "hook_W": "W.hook_point",
    "hook_out": "hook_point",
}


@pytest.fixture
def pair():
    written = Written()
    return written, hl.auto_hook(Plain(written))


@pytest.fixture
def x():
    return torch.randn(1, 5, 4)


def test_points_and_models_are_of_its_classes():
    model = hl.auto_hook(AutoEncoder())
    assert isinstance(model, HookedRootModule)
    assert isinstance(model, hl.HookedModel)
    assert all(isinstance(point, HookPoint) for point in model.hook_points())
    assert all(isinstance(point, hl.HookPoint) for point in model.hook_points())
    assert str(model.hook_dict.items()).startswith("dict_items([('hook_point', HookPoint()), ('W_enc.hook_point', Hook")


def test_a_decorated_class_is_one_of_its_too(x):
    @hl.auto_hook
    class Decorated(nn.Module):
        def __init__(self):
            super(Decorated, self).__init__()  # noqa: UP008
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(x)

    model = Decorated()
    assert isinstance(model, HookedRootModule)
    assert all(isinstance(point, HookPoint) for point in model.hook_points())
    assert model.run_with_hooks(x, fwd_hooks=[("fc.hook_point", add_one)]).equal(model(x) + 1)
    assert list(model.state_dict()) == ["fc.weight", "fc.bias"]
    with pytest.raises(hl.HooklineError, match="Written has 'add_caching_hooks'"):
        hl.auto_hook(Written)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"incl_bwd": True},
        {"remove_batch_dim": True},
        {"pos_slice": -1},
        {"pos_slice": (1, 3), "incl_bwd": True},
        {"pos_slice": [0, 2]},
        {"device": "cpu", "pos_slice": slice(None, None, 2)},
        {"pos_slice": transformer_lens.utilities.Slice((0, 2)), "remove_batch_dim": True},
    ],
    ids=repr,
)
def test_a_cache_holds_what_its_own_holds(pair, x, options):
    written, plain = pair
    output, theirs = written.run_with_cache(x, **options)
    other, ours = plain.run_with_cache(x, **options)
    assert other.equal(output)
    suffixes = ("", "_grad") if "incl_bwd" in options else ("",)
    for suffix in suffixes:
        for name, same in SAME.items():
            assert ours[same + suffix].equal(theirs[name + suffix]), name + suffix
    assert len(ours) == len(theirs)
    kept, forward, backward = plain.get_caching_hooks(**{"incl_bwd": False, **options})
    with plain.hooks(forward, backward):
        plain(x).backward()
    assert all(kept[name].equal(ours[name]) for name in ours)


@pytest.mark.parametrize("name", SAME)
def test_hooks_change_what_its_own_change(pair, x, name):
    written, plain = pair
    theirs = written.run_with_hooks(x, fwd_hooks=[(name, lambda tensor, hook: tensor * 2)])
    ours = plain.run_with_hooks(x, fwd_hooks=[(SAME[name], lambda tensor, hook: tensor * 2)])
    assert ours.equal(theirs)
    for model, point in ((written, name), (plain, SAME[name])):
        model.zero_grad()
        model.add_hook(point, lambda gradient, hook: gradient * 3, dir="bwd")
        model(x).backward()
        model.reset_hooks()
    assert plain.fc1.weight.grad.equal(written.fc1.weight.grad)


def test_a_model_written_for_it_is_hooked_and_left_as_it_was(x):
    written = Written()
    expected = written(x)
    hooked = hl.auto_hook(written)
    assert set(SAME) < set(hooked.hook_dict)
    assert set(hooked.hook_dict) - set(SAME) == {"hook_point", "W.hook_point", "fc1.hook_point", "fc2.hook_point"}
    _, cache = hooked.run_with_cache(x)
    assert cache["hook_W"].equal(cache["W.hook_point"])
    hooked.add_hook("hook_W", add_one)
    assert hooked.unwrap() is written
    assert written(x).equal(expected)
    assert [point.name for point in written.hook_points()] == list(SAME)


def test_levels_and_permanent_hooks_are_as_its_own(pair, x):
    counts = []
    for model, name in ((pair[0], "hook_relu"), (pair[1], "relu.hook_point")):
        seen = []
        note = lambda tensor, hook, seen=seen: seen.append(hook.name)  # noqa: E731
        model.add_perma_hook(name, note)
        model.add_hook(name, note, level=1)
        with model.hooks(fwd_hooks=[(name, note)]):
            model(x)
            with model.hooks(fwd_hooks=[(lambda one, name=name: one == name, note)]):
                model(x)
        model(x)
        model.reset_hooks()
        model(x)
        counts.append(len(seen))
        assert list(model.list_hooks()) == [name]
        model.reset_hooks(including_permanent=True)
        assert not model.list_hooks()
        assert model.context_level == 0
    assert counts[0] == counts[1]


def test_what_it_adds_to_a_model_works(pair, x):
    _, plain = pair
    cache = {}
    plain.cache_all(cache)
    plain(x)
    assert set(SAME.values()) == set(cache)
    plain.reset_hooks()
    assert plain.is_caching is False
    raw = nn.Sequential(nn.Linear(4, 4))
    hl.auto_hook(raw).setup()
    assert not hasattr(raw[0], "name")


def test_a_reshaped_point_gives_hooks_the_other_shape(pair, x):
    from transformer_lens.conversion_utils.conversion_steps import RearrangeTensorConversion

    _, plain = pair
    point = plain.hook_dict["fc1.hook_point"]
    point.enable_reshape(RearrangeTensorConversion("batch pos (head width) -> batch pos head width", head=2))
    seen = []

    def clear(tensor, hook):
        seen.append(tensor.shape)
        tensor[:, :, 0] = 0
        return tensor

    plain.add_hook("fc1.hook_point", clear)
    _, cache = plain.run_with_cache(x)
    assert seen == [(1, 5, 2, 3)]
    assert cache["fc1.hook_point"][..., :3].abs().sum() == 0
    plain.reset_hooks()


def test_a_point_of_its_own_in_a_model_keeps_its_name_and_works(x):
    model = hl.auto_hook(Half())
    assert list(model.hook_dict) == ["hook_point", "fc.hook_point", "relu_hook"]
    assert model.hook_dict["relu_hook"] is model.relu_hook
    expected = model(x)
    model.add_hook("relu_hook", add_one)
    output, cache = model.run_with_cache(x)
    assert cache["relu_hook"].equal(model.fc(x).relu() + 1)
    assert cache["fc.hook_point"].equal(model.fc(x))
    assert output.equal(cache["relu_hook"] * 2)
    with model.hooks(fwd_hooks=[("relu_hook", lambda tensor, hook: tensor * 0)]):
        assert model(x).equal(expected * 0)
        assert len(model.relu_hook.fwd_hooks) == 2
    assert len(model.relu_hook.fwd_hooks) == 1
    gradients = []
    model.run_with_hooks(
        x, bwd_hooks=[("relu_hook", lambda gradient, hook: gradients.append(gradient))]
    ).sum().backward()
    assert gradients[0].equal(torch.full((1, 5, 4), 2.0))
    _, cache = model.run_with_cache(x, names_filter="relu_hook")
    assert list(cache) == ["relu_hook"]
    raw = model.unwrap()
    assert raw(x).equal(expected)
    assert raw.relu_hook.name is None


def test_values_at_a_point_of_its_own_are_right_though_the_model_overwrites_them(x):
    class Overwriting(Half):
        def forward(self, x):
            return self.relu_hook(self.fc(x).relu()).mul_(2)

    model = hl.auto_hook(Overwriting())
    output, cache = model.run_with_cache(x)
    assert cache["relu_hook"].equal(output / 2)


def test_check_passes_with_its_points():
    assert hl.check(Half, {"x": torch.randn(2, 4)}, strict=True)
    assert hl.check(AutoEncoder, {"x": torch.randn(2, 4)}, strict=True)


def test_copies_are_of_its_classes(x):
    model = hl.auto_hook(AutoEncoder())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(copied, HookedRootModule)
        assert copied(x).equal(model(x))


@pytest.mark.process
def test_a_package_that_can_not_be_imported_is_said_to_be(tmp_path):
    folder = tmp_path / "transformer_lens"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('too old')")
    code = "import hookline, torch; model = hookline.auto_hook(torch.nn.ReLU()); print(model.hook_dict)"
    done = run_forked(code, path=(tmp_path,))
    assert done.stdout == "{'hook_point': HookPoint()}\n"
    assert "transformer_lens is installed but can't be imported (too old); hookline's own" in done.stderr
