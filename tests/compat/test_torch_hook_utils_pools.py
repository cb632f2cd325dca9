"""hookline.compat.torch_hook_utils: max-pooling and unpooling."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline.compat.torch_hook_utils import (
    get_layer_inputs,
    get_layer_outputs,
    replace_layer_inputs,
    replace_layer_outputs,
    save_maxpool_indices,
    use_indices_in_maxunpool,
)
from tests.errors.wording import says
from tests.support.compat_models import SQUARE, decoder, encoder
from tests.support.models import mlp

POOLS = [
    (nn.MaxPool1d(2), (1, 2, 4)),
    (nn.MaxPool2d(2), (1, 2, 4, 4)),
    (nn.MaxPool3d(2), (1, 2, 4, 4, 4)),
    (nn.AdaptiveMaxPool1d(2), (1, 2, 4)),
    (nn.AdaptiveMaxPool2d(2), (1, 2, 4, 4)),
    (nn.AdaptiveMaxPool3d(2), (1, 2, 4, 4, 4)),
    (nn.FractionalMaxPool2d(2, output_size=2), (1, 2, 4, 4)),
    (nn.FractionalMaxPool3d(2, output_size=2), (1, 2, 4, 4, 4)),
]


class Levels(nn.Module):
    """An encoder, or a decoder, that uses one layer at several depths."""

    def __init__(self, depth: int = 2, kind: type[nn.Module] = nn.MaxPool2d, **options: int) -> None:
        super().__init__()
        self.depth = depth
        self.pool = kind(**(options or {"kernel_size": 2}))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.depth):
            x = self.pool(x)
        return x


class Branches(nn.Module):
    """An encoder that uses one of two pools."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.MaxPool2d(2), nn.MaxPool2d(2)

    def forward(self, x: Tensor, branch: str) -> Tensor:
        if branch == "none":
            raise ValueError("no such branch")
        return getattr(self, branch)(x)


@pytest.mark.parametrize(("pool", "shape"), POOLS, ids=lambda one: type(one).__name__)
def test_the_indices_of_every_pool_are_saved_and_its_output_is_as_ever(pool, shape):
    x = torch.randn(shape, requires_grad=True)
    torch.manual_seed(1)
    wanted = pool(x)
    torch.manual_seed(1)
    with save_maxpool_indices({"pool": pool}) as indices:
        result = pool(x)
        assert pool.return_indices is False
    torch.manual_seed(1)
    again = copy.deepcopy(pool)
    again.return_indices = True
    assert indices["pool"].equal(again(x)[1])
    assert type(result) is Tensor
    assert result.equal(wanted)
    assert torch.autograd.grad(result.sum(), x)[0].equal(torch.autograd.grad(wanted.sum(), x)[0])


@pytest.mark.parametrize(("pool", "shape"), POOLS, ids=lambda one: type(one).__name__)
def test_a_pool_that_returns_its_indices_goes_on_doing_so(pool, shape):
    pool = copy.deepcopy(pool)
    pool.return_indices = True
    x = torch.randn(shape)
    with save_maxpool_indices(pool) as outer, save_maxpool_indices(pool) as inner:
        output, returned = pool(x)
    assert outer[""].equal(returned)
    assert inner[""].equal(returned)
    assert type(output) is Tensor


def test_what_a_pool_returns_is_seen_without_indices_by_every_other_block():
    model = encoder()
    with (
        get_layer_outputs(model.named_children()) as around,
        save_maxpool_indices(model) as outer,
        save_maxpool_indices(model) as inner,
        get_layer_outputs(model.named_children()) as within,
    ):
        result = model(SQUARE)
    assert around["pool"] is within["pool"] is result
    assert outer == inner == {"pool": torch.tensor([[[3]]])}


def test_a_pool_that_runs_several_times_in_a_forward_has_a_list_of_indices():
    model, x = Levels(depth=3), torch.randn(1, 1, 8, 8)
    pool = nn.MaxPool2d(2, return_indices=True)
    wanted, value = [], x
    for _ in range(3):
        value, one = pool(value)
        wanted.append(one)
    with save_maxpool_indices(model) as indices:
        for _ in range(2):
            model(x)
            assert [one.tolist() for one in indices["pool"]] == [one.tolist() for one in wanted]


def test_the_indices_are_those_of_the_latest_forward():
    model, back = encoder(), decoder()
    batches = [SQUARE, -SQUARE, SQUARE]
    wanted = [F.max_unpool2d(*F.max_pool2d(batch, 2, return_indices=True), 2) for batch in batches]
    with save_maxpool_indices(model) as indices:
        for batch, one in zip(batches, wanted, strict=True):
            code = model(batch)
            with use_indices_in_maxunpool(back, indices):
                assert back(code).equal(one)
                assert back(code).equal(one)
        for batch in batches[:2]:
            code = model(batch)
    with use_indices_in_maxunpool(back, indices):
        assert back(code).equal(wanted[1])


def test_the_indices_of_a_pool_that_the_latest_forward_did_not_run_are_gone():
    model = Branches()
    with save_maxpool_indices(model) as indices:
        model(SQUARE, "one")  # No warning about the other pool, which does not run.
    assert list(indices) == ["one"]
    with save_maxpool_indices(model) as indices:
        model(SQUARE, "one")
        model(SQUARE, "two")
        assert list(indices) == ["two"]
        with pytest.raises(ValueError, match="no such branch"):
            model(SQUARE, "none")
        model(SQUARE, "one")
    assert list(indices) == ["one"]


def test_parts_of_a_model_that_are_called_by_themselves_have_forwards_of_their_own():
    model = nn.ModuleDict({"shared": Levels(), "other": encoder()})
    x = torch.randn(1, 1, 4, 4)
    with save_maxpool_indices(model) as indices:
        model["other"](x)
        for _ in range(2):
            model["shared"](x)
            assert {name: type(one) for name, one in indices.items()} == {"other.pool": Tensor, "shared.pool": list}
            assert len(indices["shared.pool"]) == 2


@pytest.mark.parametrize("calls", [lambda pool: pool, lambda pool: pool.forward], ids=["call", "forward"])
def test_of_pools_that_are_given_by_themselves_each_call_counts(calls):
    pools = {"one": nn.MaxPool2d(2), "two": nn.MaxPool2d(2)}
    with save_maxpool_indices({**pools, "same": pools["one"]}) as indices:
        calls(pools["two"])(SQUARE)
        calls(pools["one"])(SQUARE)
        calls(pools["one"])(-SQUARE)
    assert {name: one.item() for name, one in indices.items()} == {"two": 3, "one": 0, "same": 0}


@pytest.mark.parametrize("as_mapping", [False, True])
def test_what_was_pooled_last_is_unpooled_first(as_mapping):
    back, x = Levels(depth=3, kind=nn.MaxUnpool1d, kernel_size=1), torch.tensor([[[1.0, 2.0, 3.0]]])
    orders = [torch.tensor([[order]]) for order in ([1, 0, 2], [0, 2, 1], [1, 2, 0])]
    wanted = x
    for order in reversed(orders):
        wanted = F.max_unpool1d(wanted, order, 1)
    with use_indices_in_maxunpool({"pool": back.pool} if as_mapping else back, {"pool": orders}):
        assert back(x).equal(wanted)
        assert back(x).equal(wanted)
        if not as_mapping:
            back.depth = 2
            back(x)  # Uses only two of three; the next forward starts with the last again.
            back.depth = 3
            assert back(x).equal(wanted)


def test_pools_of_one_shape_are_undone_by_a_decoder_that_mirrors_them():
    shape = {"kernel_size": 3, "stride": 1, "padding": 1}
    model, back = Levels(depth=3, **shape), Levels(depth=3, kind=nn.MaxUnpool2d, **shape)
    x = torch.randn(1, 1, 6, 6)
    wanted, levels = x, []
    for _ in range(3):
        wanted, one = F.max_pool2d(wanted, 3, 1, 1, return_indices=True)
        levels.append(one)
    for one in reversed(levels):
        wanted = F.max_unpool2d(wanted, one, 3, 1, 1)
    with save_maxpool_indices(model) as indices:
        code = model(x)
    with use_indices_in_maxunpool(back, indices):
        assert back(code).equal(wanted)


def test_a_decoder_that_goes_back_through_the_levels_gets_the_indices_that_fit():
    model, back, x = Levels(), nn.MaxUnpool2d(2), torch.randn(1, 1, 8, 8)
    pool = nn.MaxPool2d(2, return_indices=True)
    one, first = pool(x)
    two, second = pool(one)
    with save_maxpool_indices(model) as indices:
        result = model(x)
    with use_indices_in_maxunpool({"pool": back}, indices):
        found = back(back(result))
    assert found.equal(back(back(two, second), first))
    with use_indices_in_maxunpool({"pool": back}, indices), pytest.raises(hl.EditError, match=r"\(1, 1, 3, 3\) of its"):
        back(torch.ones(1, 1, 3, 3))


@pytest.mark.parametrize(
    "call",
    [
        lambda unpool, x: unpool(x, output_size=[3, 3]),
        lambda unpool, x: unpool(x, [3, 3]),
        lambda unpool, x: unpool(x, None, [3, 3]),
        lambda unpool, x: unpool(input=x, output_size=[3, 3]),
        lambda unpool, x: unpool(x, (1, 3, 3), output_size=[3, 3]),
    ],
    ids=["keyword", "position", "third", "all keywords", "twice"],
)
def test_an_unpool_takes_a_size_however_it_is_passed(call):
    x, indices = torch.tensor([[[4.0]]]), torch.tensor([[[3]]])
    unpool = nn.MaxUnpool2d(2)
    with use_indices_in_maxunpool(unpool, {"": indices}):
        assert call(unpool, x).equal(unpool(x, output_size=[3, 3]))
        assert unpool(x).shape == (1, 2, 2)
    assert unpool(x, indices).shape == (1, 2, 2)


@pytest.mark.parametrize("by_keyword", [False, True])
def test_indices_that_are_passed_too_are_refused(by_keyword):
    x, indices, unpool = torch.tensor([[[4.0]]]), torch.tensor([[[3]]]), nn.MaxUnpool2d(2)
    with use_indices_in_maxunpool({"up": unpool}, {"up": indices}):
        with pytest.raises(AssertionError, match=says("was called with indices", "up")):
            unpool(x, indices=indices) if by_keyword else unpool(x, indices)


def test_of_two_blocks_on_one_unpool_the_inner_one_counts():
    unpool, x = nn.MaxUnpool2d(2), torch.tensor([[[4.0]]])
    outer, inner = ({"": torch.tensor([[[place]]])} for place in (0, 3))
    with use_indices_in_maxunpool(unpool, outer), use_indices_in_maxunpool(unpool, inner):
        assert unpool(x).tolist() == [[[0.0, 0.0], [0.0, 4.0]]]


def test_indices_are_consumed_on_entering_only_if_asked_for():
    back, pooled = decoder(), torch.tensor([[[4.0]]])
    indices = {"pool": torch.tensor([[[3]]]), "other": torch.tensor([0])}
    with use_indices_in_maxunpool(back, indices):
        back(pooled)
    assert list(indices) == ["pool", "other"]
    with use_indices_in_maxunpool(back, indices, consume_indices=True):
        assert list(indices) == ["other"]
        assert back(pooled).equal(back(pooled))
    model = encoder()
    with save_maxpool_indices(model) as saved:
        model(SQUARE)
    with use_indices_in_maxunpool(back, saved, consume_indices=True):
        assert saved == {}
        assert back(pooled).tolist() == [[[0.0, 0.0], [0.0, 4.0]]]


def test_the_keys_may_be_renamed_for_a_decoder_with_other_names():
    model, x = Levels(), torch.randn(1, 1, 4, 4)
    back = nn.Sequential(OrderedDict(up1=nn.MaxUnpool2d(2), up2=nn.MaxUnpool2d(2)))
    with save_maxpool_indices(model) as indices:
        result = model(x)
    with use_indices_in_maxunpool(back, {f"up{number}": indices["pool"] for number in (1, 2)}):
        assert back(result).max() == x.max()


def test_an_unpool_without_indices_is_named_beside_those_there_are():
    back = decoder()
    with pytest.warns(hl.HooklineWarning, match=says("no indices were given for", "pool", "enc.pool")) as said:
        with use_indices_in_maxunpool(back, {"enc.pool": torch.tensor([[[3]]])}):
            with pytest.raises(TypeError, match="missing 1 required positional argument: 'indices'"):
                back(torch.tensor([[[4.0]]]))
    assert said[0].filename == __file__


def test_models_without_pools_and_pools_that_did_not_run_are_said_to_be():
    with (
        pytest.warns(hl.HooklineWarning, match=says("Linear has none of MaxPool1d")),
        save_maxpool_indices(nn.Linear(1, 1)),
    ):
        pass
    with pytest.warns(hl.HooklineWarning, match=says("Linear has none of MaxUnpool1d")):
        with use_indices_in_maxunpool(nn.Linear(1, 1), {}):
            pass
    with pytest.warns(hl.HooklineWarning, match="nothing passed 'pool'"), save_maxpool_indices(encoder()):
        pass
    with pytest.raises(hl.HooklineError, match=says("is a AvgPool1d", "pool")):
        with save_maxpool_indices({"pool": nn.AvgPool1d(2)}):
            pass


def test_a_second_forward_after_a_failed_block_works():
    model = encoder()
    with pytest.raises(ZeroDivisionError), save_maxpool_indices(model):
        model(SQUARE)
        model(SQUARE)
        1 / 0
    assert model(SQUARE).tolist() == [[[4.0]]]


def test_pools_and_unpools_in_checkpoints_count_once():
    model, back, x = encoder(), decoder(), SQUARE.clone().requires_grad_()
    with save_maxpool_indices(model) as indices:
        pooled = [checkpoint(model, batch, use_reentrant=False) for batch in (x, -x)]
        sum(pooled).sum().backward()
    assert indices["pool"].tolist() == [[[0]]]
    inputs = [torch.ones(1, 1, 1, requires_grad=True) for _ in range(2)]
    with use_indices_in_maxunpool({"pool": back.pool}, {"pool": [torch.tensor([[[place]]]) for place in (0, 3)]}):
        found = [checkpoint(back, value, use_reentrant=False) for value in inputs]
    for one in reversed(found):
        (one * torch.arange(4.0).view(2, 2)).sum().backward()
    assert [one.nonzero().tolist() for one in found] == [[[0, 1, 1]], [[0, 0, 0]]]
    assert [value.grad.item() for value in inputs] == [3.0, 0.0]  # The checkpoint recomputes with the same indices.


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("wrap", [lambda layer: torch.compile(layer, backend="eager"), nn.DataParallel], ids=["c", "d"])
def test_a_layer_in_a_wrapper_is_a_layer(wrap):
    if wrap is nn.DataParallel and torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA: it moves the input there")
    model, x = mlp(), torch.ones(2, 4)
    inner, model[0] = model[0], wrap(model[0])
    with get_layer_outputs(model.named_modules()) as outputs, get_layer_inputs(model.named_modules()) as inputs:
        result = model(x)
    inside = next(name for name in outputs if name.startswith("0."))
    assert {*outputs} == {*inputs} == {"0", inside, "1", "2", ""}
    assert outputs["0"] is outputs[inside]
    assert outputs["0"].equal(inner(x))
    assert outputs[""] is result
    assert inputs["0"] is inputs[inside] is x
    with replace_layer_outputs([("0", model[0])], {"0": torch.full((2, 8), 7.0)}):
        assert model[0](x).eq(7).all()
    with replace_layer_inputs([("0", model[0])], {"0": 2 * x}):
        assert model[0](x).equal(inner(2 * x))
    with get_layer_outputs([("model", wrap(model))]) as outputs:
        result = model(x)
    assert outputs["model"] is result
    torch.compiler.reset()


def test_a_forward_of_the_instance_is_a_forward():
    model = nn.Sequential(nn.Module(), nn.Linear(1, 1))
    model[0].forward = lambda x: x + 1
    model[1].forward = torch.neg
    with get_layer_outputs(model.named_children()) as outputs, get_layer_inputs(model.named_children()) as inputs:
        model(torch.ones(1))
    assert {name: value.item() for name, value in outputs.items()} == {"0": 2.0, "1": -2.0}
    assert {name: value.item() for name, value in inputs.items()} == {"0": 1.0, "1": 2.0}
    with replace_layer_inputs(model.named_children(), {"0": torch.ones(1) * 4, "1": torch.ones(1) * 8}):
        assert model(torch.ones(1)).item() == -8


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated", "ignore:.*torch.jit")
def test_a_part_that_is_compiled_by_torch_jit_is_passed_over():
    model = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.ReLU())
    with get_layer_outputs(model.named_modules()) as outputs:
        model(torch.ones(2, 4))
    assert list(outputs) == ["1", ""]


def test_a_forward_that_is_called_directly_is_seen():
    layer = nn.Linear(1, 1)
    with get_layer_outputs([("layer", layer)]) as outputs:
        result = layer.forward(torch.ones(1))
    assert outputs["layer"] is result


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo itself reads .grad.
def test_everything_works_on_a_compiled_model():
    model = nn.Sequential(nn.Conv1d(1, 2, 1), nn.MaxPool1d(2), nn.ReLU(inplace=True))
    compiled, x = torch.compile(model, backend="eager"), torch.randn(1, 1, 4)
    wanted = compiled(x)
    with get_layer_outputs(model.named_children()) as outputs, save_maxpool_indices(model) as indices:
        assert compiled(x).equal(wanted)
    assert outputs["1"].relu().equal(wanted)
    assert indices["1"].shape == (1, 2, 2)
    with replace_layer_outputs([("1", model[1])], {"1": -torch.ones(1, 2, 2)}):
        assert not compiled(x).any()
    torch.compiler.reset()
