"""Every few steps a watch keeps statistics of each layer, and passes them to the given loggers."""

from __future__ import annotations

import json
import math
import time

import pytest
import torch
from torch import nn

import hookline as hl
from tests.errors.wording import says
from tests.support.models import mlp

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def train(model, steps, *where, every=1, accumulate=1, optimizer=None, **options):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.watch(model, *where, every=every, **options) as watch:
        for _ in range(steps):
            optimizer.zero_grad()
            for _ in range(accumulate):
                (model(X) - 1).square().sum().backward()
            optimizer.step()
    return watch


def norm(tensors):
    return math.sqrt(sum(tensor.square().sum().item() for tensor in tensors))


def test_the_numbers_are_those_of_the_values_gradients_and_weights():
    model = mlp()
    before = [parameter.detach().clone() for parameter in model[0].parameters()]
    _, acts = hl.run(model, X, capture="*")
    log = train(model, 1).log
    after = list(model[0].parameters())
    assert log['1["rms"]'].item() == pytest.approx(acts["1"].square().mean().sqrt().item())
    assert log['1["zeros"]'].item() == pytest.approx((acts["1"] == 0).float().mean().item())
    assert log['0["largest"]'].item() == pytest.approx(acts["0"].abs().max().item())
    assert log['0["gradient"]'].item() == pytest.approx(norm(one.grad for one in after))
    assert log['0["weight"]'].item() == pytest.approx(norm(after))
    moved = norm([new - old for new, old in zip(after, before, strict=True)])
    assert log['0["update"]'].item() == pytest.approx(moved / norm(before), rel=1e-5)
    assert '1["weight"]' not in log


def test_the_log_is_a_cache_with_one_call_for_each_step_that_was_kept(tmp_path):
    watch = train(mlp(), 7, every=3)
    assert watch.steps == 7
    assert watch.logged == [0, 3, 6]
    log = watch.log
    assert len(log.calls('2["rms"]')) == 3
    assert list(log.select('*["rms"]')) == ['0["rms"]', '1["rms"]', '2["rms"]']
    assert log.select('*["gradient"]').stack(call=-1).shape == (2,)
    log.save(tmp_path / "log.safetensors")
    again = hl.Cache.load(tmp_path / "log.safetensors")
    assert again.calls('["rms"]') == log.calls('["rms"]')


def test_a_watch_says_how_many_steps_it_saw_and_kept():
    assert repr(train(mlp(), 1)) == "a watch on Sequential: 1 step; statistics of 1 step, 0, in its log"
    assert repr(train(mlp(), 9)).endswith("9 steps; statistics of 9 steps, 0, 1 … 8, in its log")
    with hl.watch(mlp()) as watch:
        assert repr(watch) == "a watch on Sequential: 0 steps"


def test_gradients_of_several_forwards_count_for_one_step():
    model = mlp()
    watch = train(model, 4, every=2, accumulate=3)
    assert (watch.steps, watch.logged) == (4, [0, 2])


def test_a_function_gets_the_step_and_the_numbers_by_name():
    got = []
    train(mlp(), 3, every=2, to=lambda step, numbers: got.append((step, dict(numbers))))
    assert [step for step, _ in got] == [0, 2]
    assert {"rms/0", "zeros/1", "largest/2", "gradient/0", "weight/2", "update/0", "rms/model"} <= set(got[0][1])
    assert all(isinstance(number, float) for number in got[0][1].values())


def test_in_inference_a_step_is_a_forward():
    model, got = mlp().eval(), []
    with torch.inference_mode(), hl.watch(model, "0", every=2, to=lambda step, _: got.append(step)) as watch:
        for _ in range(5):
            model(X)
    assert got == watch.logged == [0, 2, 4]
    assert '0["gradient"]' not in watch.log


def test_validation_between_steps_is_no_step():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.watch(model, every=1) as watch:
        for _ in range(3):
            model.train()
            model(X).sum().backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                model(X), model(X)
    assert watch.logged == [0, 1, 2]


def test_steps_of_an_optimizer_of_another_model_do_not_count_and_two_of_one_model_count_once():
    model, other = mlp(), mlp()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.Adam(model[2].parameters(), lr=0.1)
    foreign = torch.optim.SGD(other.parameters(), lr=0.1)
    with hl.watch(model, every=1, optimizer=[first, second]) as watch:
        for _ in range(3):
            model(X).sum().backward()
            other(X).sum().backward()
            first.step(), foreign.step(), second.step()
    assert watch.steps == 3
    assert [len(watch.log.calls(f'{layer}["update"]')) for layer in (0, 2)] == [3, 3]


def two_halves(model):
    return [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[2].parameters(), lr=0.1)]


def step_each(model, optimizers, steps, is_due=lambda number, step: True):
    for step in range(steps):
        model(X).sum().backward()
        for number, optimizer in enumerate(optimizers):
            if is_due(number, step):
                optimizer.step()


@pytest.mark.parametrize(
    "optimizers", [two_halves, lambda model: [torch.optim.SGD([one], lr=0.1) for one in model.parameters()]]
)
def test_optimizers_of_one_model_that_step_after_the_same_backward_are_one_step(optimizers):
    model = mlp()
    with hl.watch(model, every=1) as watch:
        step_each(model, optimizers(model), 6)
    assert (watch.steps, watch.logged) == (6, [0, 1, 2, 3, 4, 5])
    assert [len(watch.log.calls(f'{layer}["update"]')) for layer in (0, 2)] == [6, 6]


def test_steps_go_on_when_an_optimizer_steps_seldom_or_another_takes_over():
    model = mlp()
    optimizers = two_halves(model)
    with hl.watch(model, every=1) as watch:
        step_each(model, optimizers, 10, lambda number, step: number == 0 or step % 5 == 0)
        step_each(model, [torch.optim.SGD(model.parameters(), lr=0.1)], 3)
    assert watch.logged == list(range(13))
    assert watch.steps == 13
    assert len(optimizers) == 2  # Keeps the optimizers alive until here.


@pytest.mark.parametrize("backward", [True, False])
def test_parts_that_are_called_alone_count_by_their_optimizer(backward):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with hl.watch(model, every=1, backward=backward) as watch:
        for factor in (1.0, 2.0, 3.0):
            model[2](model[1](model[0](X * factor))).sum().backward()
            optimizer.step()
        assert watch.logged == [0, 1, 2]
    model[0].bias.data.zero_()
    rows = [one.item() for one in watch.log.calls('0["rms"]')]
    assert rows[0] < rows[1] < rows[2]
    assert rows[0] == pytest.approx(hl.run(model, X, capture="0")[1]["0"].square().mean().sqrt().item(), rel=1)


def test_optimizers_that_step_within_the_backward_are_one_step():
    model = mlp()
    optimizers = {one: torch.optim.SGD([one], lr=0.1) for one in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        parameter.grad = None

    for one in model.parameters():
        one.register_post_accumulate_grad_hook(step)
    with hl.watch(model, every=1) as watch:
        for _ in range(3):
            model(X).sum().backward()
    assert watch.logged == [0, 1, 2]
    assert len(watch.log.calls('2["update"]')) == 3


def test_an_optimizer_that_runs_the_model_itself_steps_once():
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = (model(X) - 1).square().sum()
        loss.backward()
        return loss

    with hl.watch(model, every=1) as watch:
        optimizer.step(closure), optimizer.step(closure)
    assert watch.logged == [0, 1]
    assert watch.log['0["update"]'] > 0


def test_a_model_that_is_only_used_counts_forwards_with_gradients_too():
    model = mlp().eval()
    with hl.watch(model, every=2) as watch:
        for _ in range(5):
            model(X).sum().backward()
        assert watch.logged == [0, 2]
    assert (watch.steps, watch.logged) == (5, [0, 2, 4])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.watch(model, every=1) as watch:  # In eval mode, but the optimizer shows that it trains.
        step_each(model, [optimizer], 3)
    assert (watch.steps, watch.logged) == (3, [0, 1, 2])


def test_steps_go_on_counting_after_an_evaluation_that_came_first():
    model = mlp()
    with hl.watch(model, every=1) as watch:
        with torch.no_grad():
            model(X), model(X)
        step_each(model, [torch.optim.SGD(model.parameters(), lr=0.1)], 3)
    assert (watch.steps, watch.logged) == (5, [0, 1, 2, 3, 4])


def test_an_evaluation_amid_training_is_not_in_its_statistics_but_a_part_without_gradients_is():
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.below, self.above = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            with torch.no_grad():
                x = self.below(x)
            return self.above(x)

    model = Frozen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with hl.watch(model, every=1) as watch:
        for _ in range(3):
            step_each(model, [optimizer], 1)
            with torch.no_grad():
                model(X * 1000), model.below(X * 1000)
    for site in ('below["rms"]', 'above["rms"]'):
        rows = watch.log.calls(site)
        assert len(rows) == 3
        assert len({round(one.item(), 6) for one in rows}) == 1


def test_numbers_are_handed_on_when_the_next_pass_begins_or_somebody_asks():
    model, got = mlp(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.watch(model, every=1, to=lambda step, _: got.append(step)) as watch:
        step_each(model, [optimizer], 2)
        assert got == [0]
        assert watch.logged == [0, 1] == got
        step_each(model, [optimizer], 1)
    assert got == [0, 1, 2]


def test_the_last_numbers_are_handed_on_when_something_else_fails():
    model, got = mlp(), []
    with pytest.raises(ZeroDivisionError):
        with hl.watch(model, every=1, to=lambda step, _: got.append(step)):
            step_each(model, [torch.optim.SGD(model.parameters(), lr=0.1)], 2)
            raise ZeroDivisionError
    assert got == [0, 1]


def test_a_step_can_be_said_by_hand():
    model = mlp()
    with hl.watch(model, every=1) as watch:
        for _ in range(2):
            model(X).sum().backward()
            for parameter in model.parameters():
                parameter.data -= 0.1 * parameter.grad
            watch.step()
    assert watch.logged == [0, 1]


def test_what_a_step_has_no_number_of_is_nan_so_that_each_number_is_of_its_step():
    model = nn.Linear(4, 2)
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    got = []
    watch = train(model, 2, to=lambda _, numbers: got.append(numbers))
    assert [math.isnan(one) for one in watch.log.calls('["update"]')] == [True, False]
    assert ["update/model" in numbers for numbers in got] == [False, True]

    class Seldom(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.expert = nn.Linear(4, 4), nn.Linear(4, 4)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return self.expert(self.body(x)) if self.calls == 2 else self.body(x)

    watch = train(Seldom(), 3)
    assert [math.isnan(one) for one in watch.log.calls('expert["rms"]')] == [True, False, True]


@pytest.mark.parametrize("column", [0, 511, 1023])
def test_an_update_of_any_column_of_a_large_parameter_shows(column):
    model, x = nn.Sequential(nn.Linear(1024, 1024, bias=False)), torch.zeros(1, 1024)
    x[0, column] = 1  # So that only this column gets a gradient.
    before = model[0].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with hl.watch(model, every=1) as watch:
        model(x).sum().backward()
        optimizer.step()
    expected = (model[0].weight.detach() - before).norm() / before.norm()
    assert watch.log.calls('0["update"]')[-1].item() == pytest.approx(expected.item(), rel=0.2)


def test_tensorboard_gets_them_in_a_folder_or_through_a_writer(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    def read(folder):
        found = EventAccumulator(str(folder)).Reload()
        return {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}

    torch.manual_seed(1)
    watch = train(mlp(), 3, every=2, to=tmp_path / "a")
    writer = SummaryWriter(tmp_path / "b")
    torch.manual_seed(1)
    train(mlp(), 3, every=2, to=writer)
    writer.add_scalar("mine", 1.0, 0)  # The watch left the writer open.
    writer.close()
    written = read(tmp_path / "a")
    assert [step for step, _ in written["rms/0"]] == [0, 2]
    kept = [number.item() for number in watch.log.calls('0["rms"]')]
    assert [value for _, value in written["rms/0"]] == pytest.approx(kept)
    assert read(tmp_path / "b") == {**written, "mine": [(0, 1.0)]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_weights_and_biases_gets_them_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="watch", dir=str(tmp_path), settings=wandb.Settings(x_disable_stats=True, console="off"))
    watch = train(mlp(), 5, every=2, to=[run, lambda step, numbers: run.log({"mine": step})])
    run.finish()
    deadline, rows = time.monotonic() + 60, []
    while len(rows) < 6 and time.monotonic() < deadline:  # wandb writes them in another process, which may be slow.
        rows = read_wandb(next(tmp_path.rglob("*.wandb")))
        time.sleep(0.05)
    ours = [row for row in rows if "rms/0" in row]
    assert [row["watch/step"] for row in ours] == [0, 2, 4]
    assert [row["rms/0"] for row in ours] == pytest.approx([one.item() for one in watch.log.calls('0["rms"]')])
    assert [row["mine"] for row in rows if "mine" in row] == [0, 2, 4]


def read_wandb(path):
    """Read back the history rows of an offline run, which are Record messages in a log in LevelDB's format."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for data in records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in items})
    return rows


def records(data, head=7, block=32768):
    """Return the records of such a log. A record may be in several pieces, none of which crosses the end of a block."""
    assert data[:4] == b":W&B"
    position, whole = head, b""
    while position + head <= len(data):
        left = block - position % block
        if left < head:
            position += left
            continue
        size, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        if position + head + size > len(data):
            return  # This record is still being written.
        piece = data[position + head : position + head + size]
        position += head + size
        whole = piece if kind in (1, 2) else whole + piece
        if kind in (1, 4):  # A whole record, or its last piece.
            yield whole


def test_statistics_of_a_training_without_an_optimizer_of_torch_are_missed_aloud():
    model = nn.Sequential(nn.Linear(3, 2))
    watch = hl.watch(model, every=1)
    for _ in range(2):  # Each block warns.
        with pytest.warns(hl.HooklineWarning, match=says("forwards no optimizer", 2)), watch:
            for _ in range(2):
                model(torch.ones(1, 3)).sum().backward()
    with watch:
        watch.step()
    with pytest.warns(hl.HooklineWarning, match=says("no statistics were kept")), watch:
        model(torch.ones(1, 3)).sum().backward()


def test_forwards_that_look_like_training_and_are_none_are_missed_aloud():
    model = mlp()
    with pytest.warns(hl.HooklineWarning, match=says("eval() or torch", 3)):
        with hl.watch(model, every=1) as watch:
            for _ in range(3):
                model(X)
    assert watch.logged == []
    for how in (torch.no_grad(), torch.enable_grad()):
        with how, hl.watch(model.eval(), every=1) as watch:
            for _ in range(3):
                model(X)
        assert watch.logged == [0, 1, 2]


def test_statistics_of_parts_that_are_called_without_the_model_are_missed_aloud():
    model = mlp().eval()
    with pytest.warns(hl.HooklineWarning, match=says("parts of Sequential ran")):
        with hl.watch(model, every=1):
            model[0](X)
    with hl.watch(model, every=1) as watch:
        for _ in range(2):
            model[0](X)
            watch.step()
    assert watch.logged == [0, 1]
    with hl.watch(model, every=1):
        pass  # Nothing ran.


class Blocks(nn.Module):
    """A model of blocks, whose parameters are all in inner layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for block in self.h:
            x = block(x)
        return self.head(x)


def test_a_block_has_the_norms_of_all_parameters_in_it():
    model = Blocks()
    log = train(model, 1, "h.*", every=1).log
    for layer, block in enumerate(model.h):
        expected = norm(one.grad for one in block.parameters())
        assert log[f'h.{layer}["gradient"]'].item() == pytest.approx(expected)
        assert log[f'h.{layer}["weight"]'].item() == pytest.approx(norm(block.parameters()))
        assert log[f'h.{layer}["update"]'].item() > 0
    whole = train(model, 1, every=1).log
    assert whole['["gradient"]'].item() == pytest.approx(norm(one.grad for one in model.parameters()))
    assert whole['h.0.0["gradient"]'].item() == pytest.approx(norm(one.grad for one in model.h[0][0].parameters()))


def test_what_is_ignored_is_in_no_norm_around_it():
    model = Blocks()
    log = train(model, 1, "", "h.*", every=1, ignore=["head", "h.0.2"]).log
    kept = [one for block in model.h for one in block.parameters() if one not in {*model.h[0][2].parameters()}]
    assert log['["weight"]'].item() == pytest.approx(norm(kept))
    assert log['h.0["weight"]'].item() == pytest.approx(norm(model.h[0][0].parameters()))
    assert log['h.1["weight"]'].item() == pytest.approx(norm(model.h[1].parameters()))


def test_a_bad_gradient_inside_a_watched_block_is_found():
    model = Blocks()
    model.h[1][2].weight.register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(hl.BadValue, match=r"'h.1.2.weight:param'"), hl.watch(model, "h.*"):
        model(torch.ones(1, 4)).sum().backward()


def test_the_log_is_drawn_as_curves_over_steps():
    pytest.importorskip("matplotlib")
    log = train(Blocks(), 7, "h.*", every=3).log
    figure = log.plot()
    assert [ax.get_ylabel().partition(",")[0] for ax in figure.axes] == [
        *("rms", "zeros", "largest", "gradient", "weight", "update")
    ]
    first = figure.axes[0].lines
    assert [line.get_label() for line in first] == ["h.0", "h.1", "h.2"]
    assert list(first[1].get_xdata()) == [0, 3, 6]
    assert list(first[1].get_ydata()) == [value.item() for value in log.calls('h.1["rms"]')]
    one = log.select('h.*["gradient"]').plot()
    assert len(one.axes) == 1
    assert one.axes[0].get_xlabel() == "step"
    assert log.plot('h.1["rms"]', ax=one.axes[0]) is one.axes[0]
    with pytest.raises(hl.HooklineError, match=says("don't go into one axes")):
        log.plot(ax=one.axes[0])
    assert log.plot('h.*["rms"]', call=0).axes[0].get_xlabel() == 'layer h.*["rms"]'


def test_a_site_has_one_colour_in_all_panels_and_there_is_one_legend():
    pytest.importorskip("matplotlib")
    model = nn.Sequential(nn.ReLU(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    figure = train(model, 3, every=1).log.plot()
    colours = {}
    for ax in figure.axes:
        for line in ax.lines:
            colours.setdefault(line.get_label(), set()).add(line.get_color())
    assert len(figure.axes) == 6
    assert len(figure.axes[3].lines) < len(figure.axes[0].lines)  # Some sites have no gradient norm.
    assert all(len(found) == 1 for found in colours.values())
    legends = [ax.get_legend() for ax in figure.axes if ax.get_legend() is not None]
    assert len(legends) == 1
    assert {text.get_text() for text in legends[0].get_texts()} == {*colours}


def test_a_site_with_calls_or_tokens_has_numbers_in_the_steps_in_which_these_pass():
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 20, "bos_token_id": 0, "eos_token_id": None}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    ids, block = torch.randint(20, (2, 5)), "transformer.h.1"
    where = [f"{block}{part}" for part in ("[:, @prompt[-1]]", "[:, @new]", "[:, @-1]", "#{0,2}")]
    with hl.watch(model, *where, every=1) as watcher, hl.capture(model, block, keep="all") as acts:
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, pad_token_id=0)
    rms = [value.square().mean().sqrt().item() for value in acts.calls(block)]
    first = acts.calls(block)[0][:, -1].square().mean().sqrt().item()
    nan = math.nan
    expected = [[first, nan, nan, nan], [nan, *rms[1:]], [first, *rms[1:]], [rms[0], nan, rms[2], nan]]
    for site, numbers in zip(where, expected, strict=True):
        found = [float(number) for number in watcher.log.calls(f'{site}["rms"]')]
        assert found == pytest.approx(numbers, nan_ok=True), site
