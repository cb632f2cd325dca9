"""A limit on the memory of captures: values over it are refused, or are spilled to disk and come back unchanged."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F

import hookline as hl
from tests.errors.wording import says
from tests.support.cache_budgets import VALUE, Echo, Step, agree, bytes_at, bytes_in, files, model_of, on_disk, x

pytestmark = [
    pytest.mark.usefixtures("nothing_stays_on_disk"),
    pytest.mark.filterwarnings("ignore:ComplexHalf"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

SPARSE = torch.arange(4), torch.arange(3), torch.ones(3), (3, 3)


class TestRefusing:
    def test_what_is_too_much_is_refused_at_its_place_and_what_was_kept_is_still_there(self):
        model = model_of()
        with pytest.raises(hl.CacheFull, match=says("raise the limit", "2", 512, "1,024")):
            with hl.capture(model, "*", limit=2 * VALUE + 100) as acts:
                model(x)
        assert list(acts) == ["0", "1"]
        assert acts["1"].equal(model[:2](x))
        with pytest.raises(hl.NotCaptured, match=says("was not kept", "2", 512, "1,124")):
            acts["2"]

    def test_it_is_a_memory_error_that_says_what_to_do(self):
        model = model_of()
        with pytest.raises(MemoryError, match=says("raise the limit")):
            with hl.capture(model, "*", limit=VALUE):
                model(x)

    def test_exactly_the_limit_fits(self):
        model = model_of()
        with hl.capture(model, "*", limit=4 * VALUE) as acts:
            model(x)
        assert len(acts) == 4
        with pytest.raises(hl.CacheFull), hl.capture(model, "*", limit=4 * VALUE - 1):
            model(x)

    @pytest.mark.parametrize("keep", ["last", 3])
    def test_what_is_replaced_makes_room_for_what_replaces_it(self, keep):
        model = model_of()
        calls = 1 if keep == "last" else keep
        with hl.capture(model, "*", keep=keep, limit=4 * calls * VALUE) as acts:
            for _ in range(10):
                model(x)
        assert [len(acts.calls(site)) for site in acts] == [calls] * 4

    def test_every_call_that_is_kept_counts(self):
        model = model_of()
        with pytest.raises(hl.CacheFull, match="'1'"), hl.capture(model, "*", keep="all", limit=13 * VALUE) as acts:
            for _ in range(10):
                model(x)
        assert [len(acts.calls(site)) for site in acts] == [4, 3, 3, 3]

    def test_a_cache_that_is_cleared_has_room_again(self):
        model = model_of()
        hooks = hl.Hooks(model)
        acts = hooks.capture("*", keep="all", limit=4 * VALUE)
        for _ in range(3):
            model(x)
            acts.clear()
        assert len(acts) == 0
        hooks.remove()

    def test_a_recursive_module_whose_outer_call_is_not_kept_needs_no_room_for_it(self):
        class Twice(nn.Module):
            def forward(self, value: Tensor, depth: int = 3) -> Tensor:
                return value + 1 if depth == 0 else self(value, depth - 1).repeat(2, 1)

        model = Twice()
        with hl.capture(model, "", limit=VALUE) as acts:
            model(x)
        with pytest.warns(hl.HooklineWarning, match=says("fired several times in one forward")):
            assert acts[""].equal(x + 1)

    def test_each_capture_has_a_limit_of_its_own(self):
        model = model_of()
        hooks = hl.Hooks(model)
        hooks.capture("0", limit=VALUE)
        acts = hooks.capture("1", limit=VALUE)
        model(x)
        assert len(acts) == 2
        hooks.remove()

    def test_a_gradient_is_refused_in_backward(self):
        model = model_of()
        with hl.capture(model, "*:grad_output", limit=2 * VALUE) as acts:
            output = model(x).square().sum()
        with pytest.raises(hl.CacheFull, match=says("raise the limit", "1:grad_output", 512, "1,024")):
            output.backward()
        assert list(acts) == ["3:grad_output", "2:grad_output"]

    def test_what_was_refused_does_not_count_while_somebody_holds_the_error(self):
        model = Echo()
        with hl.capture(model, "at.{0,1}", limit=100) as acts:
            model(torch.ones(10))
            with pytest.raises(hl.CacheFull) as caught:
                model(torch.ones(20), 1)
            model(torch.ones(15), 1)
        assert caught.value.__traceback__ is not None
        assert [acts[site].numel() for site in acts] == [10, 15]

    def test_a_graph_may_be_limited(self):
        model = model_of()
        with pytest.raises(hl.CacheFull), hl.capture(model, "*", detach=False, limit=2 * VALUE) as acts:
            model(x)
        assert acts["1"].requires_grad

    def test_what_holds_no_tensor_needs_no_room(self):
        model = Echo()
        with hl.capture(model, "at.0", keep="all", limit=0) as acts:
            for value in ("text", 3, None, torch.zeros(0)):
                model(value)
        assert acts.calls("at.0")[:3] == ["text", 3, None]


class TestCounting:
    @pytest.mark.parametrize("options", [{}, {"clone": False}, {"clone": True}], ids=str)
    def test_what_is_counted_is_what_is_there(self, options):
        def run(limit: int) -> None:
            with hl.capture(model := model_of(), "*", keep=2, limit=limit, **options):
                for _ in range(3):
                    model(x)

        run(8 * VALUE)
        with pytest.raises(hl.CacheFull):
            run(8 * VALUE - 1)

    @pytest.mark.parametrize(
        "with_gradients",
        [
            False,
            pytest.param(
                True,
                marks=pytest.mark.skipif(
                    torch.__version__ < "2.5",
                    reason="needs torch 2.5, before which what autograd saves is copied at once",
                ),
            ),
        ],
    )
    def test_memory_that_several_places_share_counts_once(self, with_gradients):
        # The input of each layer is the output of the one before.
        model, where = model_of(), ("*", "*:input")
        with torch.set_grad_enabled(with_gradients):
            with hl.capture(model, *where, limit=5 * VALUE) as acts:
                model(x)
            with pytest.raises(hl.CacheFull), hl.capture(model, *where, limit=5 * VALUE - 1):
                model(x)
        assert len(acts) == 8

    @pytest.mark.parametrize(("clone", "alone"), [(False, VALUE), (None, VALUE // 2), (True, VALUE // 2)])
    def test_a_part_of_a_tensor_holds_all_of_it_unless_it_was_copied(self, clone, alone):
        class Split(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.left, self.right = nn.Identity(), nn.Identity()

            def forward(self, value: Tensor) -> Tensor:
                left, right = (value + 0).chunk(2, dim=-1)
                return self.left(left) + self.right(right)

        model = Split()
        # A small value that shares memory with others is copied at once.
        for where, bytes_held in ((["left", "right"], VALUE), (["right"], alone)):
            with hl.capture(model, *where, limit=bytes_held, clone=clone):
                model(x)
            with pytest.raises(hl.CacheFull), hl.capture(model, *where, limit=bytes_held - 1, clone=clone):
                model(x)

    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            (torch.ones(1, 4).expand(1000, 4), 16),
            (torch.ones(10)[2:4], 40),
            ([torch.ones(3), {"a": torch.ones(2, dtype=torch.float64)}, "text"], 28),
            ((one := torch.ones(3), one, one[1:]), 12),
            (Step(torch.ones(5)), 20),
            (torch.eye(3).to_sparse(), 3 * 4 + 2 * 3 * 8),
            (torch.sparse_csr_tensor(*SPARSE, check_invariants=True), 32 + 24 + 12),
            (torch.sparse_csc_tensor(*SPARSE, check_invariants=True), 32 + 24 + 12),
            (torch.sparse_csr_tensor(SPARSE[0], torch.arange(6)[:3], *SPARSE[2:], check_invariants=True), 32 + 48 + 12),
            (torch.ones(1000, device="meta"), 0),
            (Normal(torch.zeros(2), torch.ones(2)), 16),
            (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), 20),
            (None, 0),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_the_bytes_of_a_value_are_those_of_the_memory_it_holds(self, value, expected):
        assert bytes_in(value) == expected

    def test_a_value_of_another_library_that_wraps_tensors_counts_what_it_wraps(self):
        from torch.testing._internal.two_tensor import TwoTensor

        assert bytes_in(TwoTensor(torch.ones(3), torch.ones(3))) == 24

    def test_what_the_user_writes_into_what_is_kept_moves_it_and_the_count_is_right_in_the_end(self):
        with hl.capture(model := Echo(), "at.{0,1}", limit=400) as acts:
            for size in (10, 20, 30):
                model(torch.ones(size))
                acts["at.0"].add_(1)  # The write moves it to new memory, and a later value may get the old.
                model(torch.ones(size), 1)
            acts.clear()
            model(torch.ones(100))
        assert bytes_at(acts) == (400, 0)

    def test_what_one_cache_has_selected_counts_as_long_as_it_is_there(self):
        hooks = hl.Hooks(model := model_of())
        acts = hooks.capture("*", limit=4 * VALUE, spill=True)
        model(x)
        chosen = acts.select("0")
        model(x + 1)
        assert on_disk(chosen) == ["0"]
        assert chosen["0"].equal(model[0](x))
        hooks.remove()


class TestWhatACacheDoes:
    def pair(self) -> tuple[hl.Cache, hl.Cache]:
        model = model_of()
        caches = []
        for options in ({"limit": VALUE, "spill": True}, {}):
            with hl.capture(model, "*", keep="all", **options) as acts:
                model(x)
                model(x * 2)
            caches.append(acts)
        assert bytes_at(caches[0]) == (VALUE, 7 * VALUE)
        return caches[0], caches[1]

    def test_everything_works_on_what_is_on_disk(self):
        acts, expected = self.pair()
        assert agree(acts, expected)
        assert agree(acts.select("{0,2}"), expected.select("{0,2}"))
        assert agree(acts.select("*[:, *]"), expected.select("*[:, *]"))
        assert agree(acts.map(torch.sin), expected.map(torch.sin))
        assert agree(acts.to(torch.float16), expected.to(torch.float16))
        assert acts.stack(call=-1).equal(expected.stack(call=-1))
        assert acts.stack("{1,3}", call=0).equal(expected.stack("{1,3}", call=0))
        assert dict(acts.stats()) == dict(expected.stats())
        assert agree(acts + expected, expected + expected)
        assert agree(acts - acts, expected - expected)
        assert "on disk" in acts._repr_html_()
        assert "0" in acts
        assert {site: value.shape for site, value in acts.items()} == dict.fromkeys("0123", (8, 16))

    def test_it_is_saved_with_what_is_on_disk(self, tmp_path):
        acts, expected = self.pair()
        acts.save(tmp_path / "ours")
        expected.save(tmp_path / "theirs")
        assert agree(hl.Cache.load(tmp_path / "ours"), expected)
        assert (tmp_path / "ours").stat().st_size == (tmp_path / "theirs").stat().st_size

    def test_it_patches_with_what_is_on_disk(self):
        acts, expected = self.pair()
        model = model_of()
        assert hl.run(model, x, patch=dict(acts)).equal(hl.run(model, x, patch=dict(expected)))
        part, expected_part = dict(acts.select("1[:, 0]")), dict(expected.select("1[:, 0]"))
        assert hl.run(model, x, patch=part).equal(hl.run(model, x, patch=expected_part))

    def test_a_copy_shares_the_files_and_a_pickle_needs_none(self):
        acts, expected = self.pair()
        copied, shallow, pickled = copy.deepcopy(acts), copy.copy(acts), pickle.dumps(acts)
        assert bytes_at(copied) == bytes_at(acts)
        assert len(files()) == 7
        acts.clear()
        assert len(shallow) == 0
        assert agree(copied, expected)
        del copied
        assert not files()
        assert agree(pickle.loads(pickled), expected)

    def test_a_copy_of_what_is_in_memory_is_a_copy(self):
        acts, _ = self.pair()
        copied = copy.deepcopy(acts)
        copied["3"].zero_()
        assert acts["3"].any()

    def test_describing_it_reads_nothing(self):
        acts, expected = self.pair()
        for path in files():
            path.unlink()
        assert repr(acts).splitlines()[1:] == repr(expected).splitlines()[1:]


def test_what_a_hook_does_tells_its_limit():
    hooks = hl.Hooks(model_of())
    hooks.capture("0", limit="1 kB")
    hooks.capture("1", limit="1 kB", spill=True)
    assert next(repr(hook.action) for hook in hooks) == "save(limit=1000)"
    assert repr(hooks.at("1")).count("save(limit=1000, spill=") == 1
    hooks.remove()


def test_the_loss_of_a_training_step_is_the_same_with_a_limit():
    losses = []
    for options in ({}, {"limit": 100, "spill": True}):
        torch.manual_seed(0)
        model = model_of()
        with hl.capture(model, "*", "*:grad_output", **options):
            loss = F.mse_loss(model(x), x)
            loss.backward()
        losses.append((loss.item(), model[0].weight.grad))
    assert losses[0][0] == losses[1][0]
    assert losses[0][1].equal(losses[1][1])
