"""Several calls of a site: stacked, joined, put in call by call, or refused because it is unknown which is which."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import GPT, Nested, tokens


def kept(**values: list[Any]) -> hl.Cache:
    """Return a cache with these values of each site, one for each call."""
    model = nn.ModuleDict({name: nn.Identity() for name in values})
    with hl.capture(model, "*", keep="all") as acts:
        for name, calls in values.items():
            for value in calls:
                model[name](value)
    return acts


def run_thrice(*where: Any, keep: str | int = "all", **options: Any) -> tuple[GPT, list[Tensor], hl.Cache]:
    """Run a model on three batches of different lengths; return it, the outputs and the captured values."""
    model = GPT()
    with hl.capture(model, *where, keep=keep, **options) as acts:
        outputs = [model(tokens(length=length)) for length in (5, 4, 6)]
    return model, outputs, acts


def replayed(model: GPT, acts: Any) -> list[Tensor]:
    """Run a model on three other batches of these lengths, with the values of a cache."""
    with hl.patch(model, acts):
        return [model(tokens(length=length)) for length in (5, 4, 6)]


def equal(ours: list[Tensor], theirs: list[Tensor]) -> list[bool]:
    return [one.equal(other) for one, other in zip(ours, theirs, strict=True)]


def test_all_calls_of_all_sites_stack_into_one_tensor() -> None:
    model = GPT()
    with hl.capture(model, "h.*", "head", keep="all") as acts:
        for _ in range(4):
            model(tokens())
    stacked = acts.stack("h.*", calls=True)
    assert stacked.shape == (3, 4, 2, 5, 8)
    assert all(stacked[layer, n].equal(acts.calls(f"h.{layer}")[n]) for layer in range(3) for n in range(4))
    assert acts.stack("head[:, -1]", calls=True).shape == (1, 4, 2, 4)
    one = hl.Cache({"h.10": torch.ones(2), "h.2": torch.zeros(2)}).stack(calls=True)
    assert one.tolist() == [[[0.0, 0.0]], [[1.0, 1.0]]]


def test_of_several_calls_the_one_to_stack_is_named_or_all_of_them() -> None:
    model = nn.Sequential(cell := nn.Linear(2, 2), cell, cell)
    with hl.capture(model, "0", "0:input", keep="all") as acts:
        model(torch.ones(1, 2))
    with pytest.raises(hl.HooklineError, match=says("calls=True takes them all", "0:input", 3)):
        acts.stack()
    assert acts.stack(call=-1)[1].equal(acts["0:input"])
    assert acts.stack("0", call=0)[0].equal(acts.calls("0")[0])
    with pytest.raises(hl.NotCaptured, match=says("has calls kept and call= is not among them", "0", 3, 3)):
        acts.stack("0", call=3)
    with pytest.raises(hl.HooklineError, match=says("one call or all of", 1)):
        acts.stack("0", call=1, calls=True)


def test_equal_shapes_stack_into_one_tensor_and_others_are_named() -> None:
    _, acts = hl.run(GPT(), tokens(), capture=["h.*", "head"])
    stacked = acts.stack("h.*")
    assert stacked.shape == (3, 2, 5, 8)
    assert stacked[1].equal(acts["h.1"])
    assert acts.stack("h.*[:, -1]").shape == (3, 2, 8)
    with pytest.raises(hl.EditError, match=says("is float32 is float32", "h.0", 5, "head", 5)):
        acts.stack("**")
    with pytest.raises(hl.EditError, match=says("is dict of n", "a", 'a["x"]')):
        hl.Cache({"a": {"n": 1, "x": torch.ones(1)}}).stack("a")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"a": [torch.ones(1)] * 3, "b": [torch.ones(1)] * 2},
            says("equally many calls stack", "a", 3, "b", 2),
        ),
        (
            {"a": [torch.ones(2), torch.ones(2)], "b": [torch.ones(2), torch.ones(3)]},
            says("is float32 in call is float32", "(2,)", "(3,)", "a", 0, "b", 1),
        ),
        ({"a": [torch.ones(2), torch.ones(2).long()]}, says("is float32 in call is", "(2,)", "a", 0, "a", 1)),
        ({"a": [torch.ones(n) for n in range(1, 6)]}, says("is float32 in call is float32", "(2,)", "(3,)", "a", 2)),
        ({"a": [(None, torch.ones(2))] * 2}, says("is tuple of", "a", 2, 0, "a[1]")),
        ({"a": [None, None]}, says("is None in call", "a", 0)),
    ],
    ids=["numbers", "shapes", "dtypes", "many shapes", "nested", "nothing"],
)
def test_calls_that_differ_do_not_stack_and_the_error_says_which(values: dict[str, list[Any]], message: str) -> None:
    with pytest.raises(hl.EditError, match=message):
        kept(**values).stack(calls=True)


def test_the_calls_of_a_site_are_joined_along_a_dimension() -> None:
    model, _, acts = run_thrice("h.*", "head")
    joined = acts.cat("h.1")
    assert joined.shape == (2, 15, 8)
    assert joined[:, 5:9].equal(acts.calls("h.1")[1])
    assert acts.cat(model.h[1], dim=-2).equal(joined)
    assert acts.cat(hl.Site.parse("h.1"), dim=1).equal(joined)
    assert acts.cat("h.1[:, -1]", dim=0).equal(torch.cat([value[:, -1] for value in acts.calls("h.1")]))
    assert acts.select("head[..., *]").cat("head[..., 3]").shape == (2, 15)


@pytest.mark.parametrize(
    ("values", "dim", "message"),
    [
        (
            [torch.ones(2, 3), torch.ones(3, 3)],
            1,
            says("nothing but dimension", "(2, 3)", "(3, 3)", 1, "a", 0, 1),
        ),
        ([torch.ones(2, 3), torch.ones(2, 3).long()], 1, says("is float32 in call int64", "(2, 3)", "a", 0)),
        ([torch.ones(2, 3), torch.ones(2)], -1, says("is float32 in call float32", "(2, 3)", "(2,)", "a", 0, 1)),
        ([torch.ones(2)], 1, says("which has no dimension", "(2,)", "a", 0, 1)),
        ([torch.ones(())] * 2, 0, says("which has no dimension stack", 0, 0, "a")),
        ([(torch.ones(2), 3)], 0, says("is tuple of in call", "a", 2, 0, "a[0]")),
        ([torch.ones(2), None], 0, says("is None in call and", "a", 1)),
        ([torch.eye(2).to_sparse(), torch.eye(2)], 0, says("these values can't be joined")),
    ],
    ids=["shapes", "dtypes", "dimensions", "no such dimension", "numbers", "nested", "nothing", "refused by torch"],
)
def test_calls_that_differ_elsewhere_do_not_join_and_the_error_says_how(
    values: list[Any], dim: int, message: str
) -> None:
    with pytest.raises(hl.HooklineError, match=message):
        kept(a=values).cat("a", dim=dim)


def test_joining_takes_one_captured_site_with_all_its_calls() -> None:
    model, _, acts = run_thrice("h.*", keep="last")
    with pytest.raises(hl.NotCaptured, match=says("matches nothing in this cache did", "h.7")):
        acts.cat("h.7")
    with pytest.raises(hl.SiteError, match=says("the calls of one site", "h.*", "h.0", "h.1", "h.2")):
        acts.cat("h.*")
    for join in (lambda: acts.cat("h.1"), lambda: acts.stack("h.*", calls=True), lambda: acts.to("cpu").cat("h.1")):
        with pytest.raises(hl.HooklineError, match=says("has one call here and others", "all")):
            join()
    with hl.capture(model, "h.1") as empty, pytest.raises(hl.NotCaptured, match=says("nothing has passed", "h.1")):
        empty.cat("h.1")


@pytest.mark.parametrize(
    "where",
    [
        ["h.*"],
        ["h.2[:, -2:]", "h.2[:, :-2]"],
        ["h.2:input", 'h.2:inputs["scale"]'],
        ["head:inputs"],
        ["head.weight:param", "h.2"],
        ["head[..., *]"],
    ],
    ids=str,
)
def test_each_call_gets_its_own_value_from_a_cache_with_several_calls(where: list[str]) -> None:
    model, outputs, acts = run_thrice(*where)
    assert equal(replayed(model, acts), outputs) == [True, True, True]
    assert equal(replayed(model, acts.select(*where)), outputs) == [True, True, True]
    hooks = hl.Hooks(model, active=False)
    assert len(hooks.patch(acts)) == len(acts)
    for _ in range(2):
        with hooks:  # Each block counts from 0.
            assert equal([model(tokens(length=length)) for length in (5, 4, 6)], outputs) == [True, True, True]
    hooks.remove()


def test_a_module_that_runs_several_times_in_a_forward_gets_each_value_in_hl_run() -> None:
    model = nn.Sequential(cell := nn.Linear(2, 2), cell, cell)
    with hl.capture(model, "0:input", keep="all") as acts:
        output = model(torch.ones(1, 2))
    assert hl.run(model, torch.zeros(1, 2), patch=acts).equal(output)
    with hl.patch(model, acts), hl.capture(model, "0:input", keep="all") as again:
        model(torch.zeros(1, 2))
    assert again == acts


class Splits(nn.Module):
    """Calls its own method twice."""

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[..., ::2], x[..., 1::2]

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.split(x)
        first, second = self.split(torch.cat([other, one], dim=-1))
        return F.relu(F.relu(one) + first - second)


def test_a_method_gets_the_value_of_each_of_its_calls() -> None:
    model = nn.Sequential(Splits())
    with hl.capture(model, "0.split()", keep="all") as acts:
        output = model(torch.arange(8.0).reshape(2, 4)[:, [1, 2, 3, 0]])
    assert len(acts.calls("0.split()")) == 2
    assert hl.run(model, torch.ones(2, 4), patch=acts).equal(output)


def test_a_nested_value_is_replayed_in_the_structure_that_passes() -> None:
    model = Nested()
    with hl.capture(model, "", keep="all") as acts:
        model(torch.ones(2, 4)), model(torch.zeros(2, 4))
    with hl.patch(model, acts):
        again = [model(torch.randn(2, 4)) for _ in range(2)]
    logits = [value["logits"] for value in acts.calls("")]
    assert equal([value["logits"] for value in again], logits) == [True, True]
    for where in ("", ":inputs"):
        with hl.capture(model, where, keep="all") as acts:
            model(torch.ones(1, 4)), model(torch.ones(1, 4))
        shapes = r"the value of call 0 has shape \(1, .\), and \(3, .\) passes; run the same batch sizes"
        with hl.patch(model, acts), pytest.raises(hl.EditError, match=shapes):
            model(torch.ones(3, 4))
        with hl.patch(model, acts, check=False):
            model(torch.ones(3, 4))


def test_a_call_beyond_the_values_says_how_many_there_are() -> None:
    model, _, acts = run_thrice("h.1")
    with (
        hl.patch(model, acts),
        pytest.raises(hl.EditError, match=says("has no value the", "h.1", 3, 3)),
    ):
        for length in (5, 4, 6, 5):
            model(tokens(length=length))
    with pytest.raises(hl.EditError, match=says("the value of call", "h.1", 0, 5, 6)):
        hl.run(model, tokens(length=6), patch=acts)
    assert hl.run(model, tokens(length=5), patch=acts).shape == (2, 5, 4)  # The values left over are not used.


def test_a_site_with_one_call_goes_into_every_call_beside_others_that_are_replayed() -> None:
    model, outputs, acts = run_thrice("h.2")
    bias = torch.full((4,), 5.0)
    again = replayed(model, acts | {"head.bias:param": bias})
    for output, one in zip(outputs, again, strict=True):
        torch.testing.assert_close(one, output - model.head.bias + bias)


def test_a_site_with_a_number_acts_on_its_call_alone() -> None:
    model, _, acts = run_thrice("h.2#1", "h.1")
    with hl.patch(model, acts.select("h.2#1")), hl.capture(model, "h.2", keep="all") as again:
        for length in (5, 4, 6):
            model(tokens(length=length))
    assert equal(again.calls("h.2")[1:2], [acts["h.2#1"]]) == [True]
    assert not again.calls("h.2")[0].equal(again.calls("h.2")[1])


def test_the_value_of_a_call_is_checked_as_that_of_any_patch() -> None:
    model = nn.Sequential(nn.Identity())
    acts = kept(**{"0": [torch.ones(2), torch.ones(2).long()]})
    with hl.patch(model, acts), pytest.raises(hl.EditError, match=says("int64 given where torch", "0")):
        model(torch.zeros(2)), model(torch.zeros(2))
    with hl.patch(model, acts, check=False):
        assert [model(torch.zeros(2)).dtype for _ in range(2)] == [torch.float32, torch.int64]
    model(torch.zeros(2))[0] = 5.0
    assert acts.calls("0")[0].tolist() == [1.0, 1.0]


def test_a_replay_shows_how_many_calls_it_has() -> None:
    model, _, acts = run_thrice("h.1")
    hooks = hl.Hooks(model)
    (hook,) = hooks.patch(acts)
    assert repr(hook) == "<patch at 'h.1': set each of 3 calls, active>"
    hook.remove()


GAPS = says("calls in this cache it", "h.1", 2, "all")


def loaded(acts: hl.Cache, folder: Path) -> hl.Cache:
    acts.save(folder / "acts.safetensors")
    return hl.Cache.load(folder / "acts.safetensors")


@pytest.mark.parametrize(
    "derive",
    [
        lambda acts, _: acts,
        lambda acts, _: acts.select("h.*"),
        lambda acts, _: acts.select("h.1", "h.0[:, 0]"),
        lambda acts, _: acts.map(torch.neg),
        lambda acts, _: acts.to(torch.float64),
        lambda acts, _: acts - acts,
        lambda acts, _: {**acts.map(torch.neg)} | acts,
        lambda acts, _: acts * 2,
        lambda acts, _: acts | {},
        lambda acts, _: copy.deepcopy(acts),
        loaded,
    ],
    ids=["live", "select", "part", "map", "to", "difference", "merge", "scaled", "copy", "deepcopy", "file"],
)
def test_of_the_latest_calls_alone_it_is_unknown_which_they_are(
    derive: Callable[[hl.Cache, Path], hl.Cache], tmp_path: Path
) -> None:
    model, _, acts = run_thrice("h.{0,1}", keep=2)
    derived = derive(acts, tmp_path)
    with pytest.raises(hl.EditError, match=GAPS):
        hl.patch(model, derived.select("h.1"))
    assert len(hl.patch(model, {"h.1": derived.calls("h.1")[0]})) == 1


def test_a_cache_that_kept_every_call_can_be_replayed_from_a_file(tmp_path: Path) -> None:
    model, outputs, acts = run_thrice("h.*", keep=3)
    assert equal(replayed(model, loaded(acts, tmp_path)), outputs) == [True, True, True]


def test_of_calls_that_a_transform_left_out_it_is_unknown_which_they_are() -> None:
    model, _, acts = run_thrice("h.1", transform=lambda value: None if value.shape[1] == 5 else value)
    assert len(acts.calls("h.1")) == 2
    with pytest.raises(hl.EditError, match=says("it is unknown which call as others have no value", "h.1", 2)):
        hl.patch(model, acts)


def test_calls_that_were_kept_since_the_cache_was_cleared_are_replayed() -> None:
    model = GPT()
    with hl.capture(model, "h.2", keep=2) as acts:
        for _ in range(3):
            model(tokens())
        acts.clear()
        outputs = [model(tokens()) for _ in range(2)]
    with hl.patch(model, acts):
        assert equal([model(tokens()) for _ in range(2)], outputs) == [True, True]


def test_a_part_that_some_calls_lack_is_not_replayed() -> None:
    model, _, acts = run_thrice("h.1[:, *]")
    assert len(hl.patch(model, acts.select("h.1[:, 3]"))) == 1
    with hl.capture(model, "h.1", keep="all") as whole:
        model(tokens(length=4)), model(tokens(length=6)), model(tokens(length=5))
    for source in (acts, acts.map(torch.neg), whole.select("h.1[:, *]")):
        with pytest.raises(hl.EditError, match=says("calls in this cache it", "h.1[:, 4]", 2)):
            hl.patch(model, source.select("h.1[:, 4]"))


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("0/relu", says("functions are counted again in each call")),
        ("0/relu#0", says("functions are counted again in each call")),
        ("0:grad_output", says("gradients are kept in their own order")),
    ],
)
def test_what_has_no_number_of_its_own_in_the_block_is_not_replayed(where: str, reason: str) -> None:
    model = nn.Sequential(Splits())
    with hl.capture(model, where, keep="all") as acts:
        for _ in range(2):
            model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    with pytest.raises(hl.EditError, match=reason):
        hl.patch(model, acts)


def test_the_functions_of_each_call_of_a_module_can_be_patched_by_name() -> None:
    model = nn.Sequential(Splits())
    with hl.capture(model, "0/relu#0", keep="all") as acts:
        outputs = [model(torch.arange(8.0).reshape(2, 4)), model(torch.ones(2, 4))]
    each = {f"0#{number}/relu#0": value for number, value in enumerate(acts.calls("0/relu#0"))}
    with hl.patch(model, each), hl.capture(model, "0/relu#0", keep="all") as again:
        assert len([model(torch.zeros(2, 4)) for _ in outputs]) == 2
    assert again == acts


def test_a_numbered_call_of_several_blocks_is_not_replayed() -> None:
    model = GPT()
    hooks = hl.Hooks(model, active=False)
    acts = hooks.capture("h.1#0", keep="all")
    for _ in range(2):
        with hooks:
            model(tokens())
    with pytest.raises(hl.EditError, match=says("calls in this cache and", "h.1#0", 2, "#0")):
        hl.patch(model, acts)
    hooks.remove()


def test_values_whose_count_began_again_are_not_replayed() -> None:
    model = GPT()
    hooks = hl.Hooks(model, active=False)
    acts = hooks.capture("h.1#1:", "h.0[*]", "h.2", keep="all")
    for length in (5, 4):
        with hooks:
            model(tokens(length=length)), model(tokens(length=length))
    for where in acts:
        with pytest.raises(hl.EditError, match=says("calls in this cache it", 0)):
            hl.patch(model, acts.select(where))
    acts.clear()
    with hooks:  # As the first one: nothing is left of the blocks before.
        outputs = [model(tokens(length=length)) for length in (5, 4, 6)]
    assert equal(replayed(model, acts.select("h.2")), outputs) == [True, True, True]
    with hl.patch(model, acts.select("h.1#1:")), hl.capture(model, "h.1", keep="all") as again:
        for length in (5, 4, 6):
            model(tokens(length=length))
    assert equal(again.calls("h.1")[1:], acts.calls("h.1#1:")) == [True, True]
    hooks.remove()


def test_values_that_were_cleared_before_anything_passed_in_a_block_leave_no_gap() -> None:
    model = GPT()
    hooks = hl.Hooks(model, active=False)
    acts = hooks.capture("h.1#1:", keep="all")
    for _ in range(2):
        with hooks:
            acts.clear()
            model(tokens()), model(tokens()), model(tokens())
    with hl.patch(model, acts), hl.capture(model, "h.1", keep="all") as again:
        model(tokens()), model(tokens()), model(tokens())
    assert equal(again.calls("h.1")[1:], acts.calls("h.1#1:")) == [True, True]
    hooks.remove()


def test_values_and_gradients_of_two_runs_can_be_brought_together() -> None:
    model = GPT()
    with hl.capture(model, "h.1", keep="all") as values:
        model(tokens()), model(tokens())
    with hl.capture(model, "h.1:grad_output", keep="all") as slopes:
        model(tokens()).sum().backward(), model(tokens()).sum().backward()
    found, theirs = (values | slopes).with_gradients()
    assert equal(found.calls("h.1"), values.calls("h.1")) == [True, True]
    assert equal(theirs.calls("h.1"), slopes.calls("h.1:grad_output")) == [True, True]


def test_calls_that_are_named_by_number_are_not_replayed_if_the_cache_was_cleared_in_between() -> None:
    model = GPT()
    with hl.capture(model, "h.1#1:", "h.2", keep="all") as acts:
        for length in (5, 5, 5):
            model(tokens(length=length))
        acts.clear(), acts.clear()
        outputs = [model(tokens(length=length)) for length in (5, 4, 6)]  # These are calls 3 to 5.
    with pytest.raises(hl.EditError, match=says("calls in this cache it", "h.1#1:", 3)):
        hl.patch(model, acts)
    assert equal(replayed(model, acts.select("h.2")), outputs) == [True, True, True]


def test_a_skip_and_a_sweep_take_one_call() -> None:
    model = nn.Sequential(cell := nn.Linear(2, 2), cell, cell)
    with hl.capture(model, "0", "0#0:input", keep="all") as acts:
        output = model(torch.ones(1, 2))
    several = says("calls in this cache and a", "0", 3, "0", "0")
    with pytest.raises(hl.EditError, match=several):
        hl.skip(model, "0", acts)
    with pytest.raises(hl.EditError, match=several):
        hl.run(model, torch.zeros(1, 2), skip=acts.select("0"))
    with pytest.raises(hl.EditError, match=several):
        hl.sweep(model, acts, lambda: pytest.fail("the model ran before it was refused"))
    assert hl.run(model, torch.zeros(1, 2), patch=dict(acts.select("0"))).equal(output)
    assert hl.run(model, torch.zeros(1, 2), patch=acts.select("0#0:input")).equal(output)


def test_statistics_sums_and_scaled_values_are_those_of_every_call() -> None:
    acts = kept(a=[torch.tensor([torch.nan, 1.0]), torch.tensor([2.0, 6.0])])
    assert acts.stats()["a"].nan == 0.25
    assert (acts.stats()["a"].mean, acts.stats()["a"].max) == (3.0, 6.0)
    assert "<svg" in acts.stats()._repr_html_()
    assert [value[1].item() for value in (acts + acts * 2).calls("a")] == [3.0, 18.0]
    assert [value.dtype for value in acts.to(torch.float16).calls("a")] == [torch.float16] * 2
    several, one_more = {"a": torch.ones(2)}, kept(a=[torch.ones(2)] * 3)
    for other, told in (
        (acts.select("a[:]"), says("only one cache has it")),
        (several, says("other number of calls", 1)),
        (one_more, says("other number of calls", 3)),
    ):
        with pytest.raises(hl.HooklineError, match=told):
            acts - other


def test_the_tokens_of_a_generation_can_be_read_from_a_part_of_a_cache() -> None:
    pytest.importorskip("matplotlib")
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 20, "bos_token_id": 0, "eos_token_id": None}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    ids = torch.randint(1, 20, (2, 5))
    with hl.capture(model, "transformer.h.1", "transformer.h.1:grad_output", keep="all") as acts:
        first = model(ids[:, :4], use_cache=True)
        (first.logits.sum() + model(ids[:, 4:], past_key_values=first.past_key_values).logits.sum()).backward()
    whole = acts.tokens("transformer.h.1")
    assert whole.shape == (2, 5, 16)
    assert torch.equal(acts.select("transformer.h.1[..., :3]").tokens("transformer.h.1[..., :3]"), whole[..., :3])
    assert torch.equal(acts.to(torch.float64).tokens("transformer.h.1"), whole.double())
    gradients = acts.tokens("transformer.h.1:grad_output")
    assert torch.equal(gradients, acts.cat("transformer.h.1:grad_output"))
    values, slopes = acts.with_gradients()
    unknown = copy.deepcopy(acts.map(torch.zeros_like))  # A copy has the values alone.
    for derived in (acts.select(), acts | {}, {} | acts, acts - acts * 0, acts - unknown, 1 * acts, values):
        assert torch.equal(derived.tokens("transformer.h.1"), whole)
        assert derived.plot("transformer.h.1", "calls").axes[0].get_xlabel() == "step"
    assert torch.equal(slopes.tokens("transformer.h.1"), gradients)
    with hl.capture(model, "transformer.h.1", keep="all") as others:  # Two sequences, of as many tokens.
        model(ids[:, :4]), model(ids[:, :1])
    for lost in (copy.deepcopy(acts.select("transformer.h.1")), acts.select("transformer.h.1") - others):
        with pytest.raises(hl.HooklineError, match=says("has no calls here that", "all")):
            lost.tokens("transformer.h.1")


def test_a_call_that_is_named_afterwards_is_in_the_list_of_calls() -> None:
    model, _, acts = run_thrice("h.1")
    for read in (acts.__getitem__, acts.select, acts.cat):
        for text in ("h.1#1", "h.1#1:", "h.1#*"):
            with pytest.raises(hl.NotCaptured, match=says("the calls kept of", "h.1", "h.1")):
                read(text)
    with pytest.raises(hl.NotCaptured, match=says("was not captured did", "h.2#1", "h.1")):
        acts["h.2#1"]
    with hl.capture(model, "h.1#*") as each:
        model(tokens())
    with pytest.raises(hl.NotCaptured, match=says("is one site for each", "h.1#*", "h.1#0")):
        each["h.1#*"]


def test_a_cache_in_place_of_a_value_is_refused_where_it_is_given() -> None:
    model, _, acts = run_thrice("h.1")
    with pytest.raises(hl.EditError, match=says("is given a Cache in", "h.1")):
        hl.patch(model, {"h.1": acts})


def test_calls_are_joined_of_the_site_that_is_named_not_of_others_with_numbers() -> None:
    _, _, acts = run_thrice("h.1", "h.1#1:")
    assert acts.cat("h.1").equal(torch.cat(acts.calls("h.1"), 1))
    assert acts.cat(hl.Site("h.1")).shape == (2, 15, 8)


def test_the_tokens_of_one_call_are_those_of_its_site_with_all_calls() -> None:
    model = GPT()
    with hl.capture(model, "h.1#-1") as acts:
        model(tokens())
    with pytest.raises(hl.HooklineError, match=says("capture with keep=", "h.1", "all")):
        acts.tokens("h.1#-1")


def test_calls_selected_with_gaps_know_their_own_steps() -> None:
    pytest.importorskip("matplotlib")
    model = nn.Sequential(nn.Embedding(9, 2))
    with hl.capture(model, "0", keep="all") as acts:
        for length in (2, 3, 4, 5):
            model(torch.arange(length)[None])
    late = acts.select("0[:, *]").select("0[:, 3]")
    assert len(late.calls("0[:, 3]")) == 2
    (line,) = late.plot(kind="calls").axes[0].lines
    assert (late.plot(kind="calls").axes[0].get_xlabel(), list(line.get_xdata())) == ("step", [2, 3])


def test_tokens_that_were_captured_by_name_are_selected_beside_the_whole_value() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 20, "bos_token_id": 0, "eos_token_id": None}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    with hl.capture(model, "transformer.h.1[:, @prompt[-1]]", "transformer.h.*", "transformer.h.1#0") as acts:
        model(torch.randint(20, (2, 5)))
    last = acts.select("transformer.h.*[:, @prompt[-1]]")
    assert list(last) == ["transformer.h.1[:, @prompt[-1]]"]
    assert torch.equal(last.stack()[0], acts["transformer.h.1"][:, -1])
    with pytest.raises(hl.SiteError, match=says("prompt names tokens")):
        acts.select("transformer.h.*[:, @prompt[0]]")
