"""Stores as torch datasets: by number, as whole samples, and shuffled over workers and ranks."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import pickle
import warnings
from collections import Counter

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, default_collate

import hookline as hl
from tests.errors.wording import says
from tests.support.prepared_processes import prepared_processes
from tests.support.stores import made, tokens

LENGTHS = [5, 1, 0, 7, 3, 2, 9, 4, 6, 1, 8]


@pytest.fixture
def store(tmp_path):
    """Two aligned arrays of tokens, and one number for each sample."""
    rows = tokens(LENGTHS)
    other = [value.float() + 1 for value in rows]
    labels = [torch.tensor([number]) for number in range(len(LENGTHS))]
    return made(tmp_path / "acts", {"h.3": rows, "h.4": other, "label": labels})


def numbers_in(loader) -> list[int]:
    """Return the numbers of the rows, in the order in which the loader returned them."""
    return [int(number) for batch in loader for number in batch.flatten().tolist()]


def joined(parts) -> list[int]:
    return list(itertools.chain.from_iterable(parts))


@pytest.fixture
def counted(tmp_path):
    """A store of 5,000 rows in units of 700 samples. The value of each row is its number."""
    return made(tmp_path / "counted", {"n": list(torch.arange(5000).view(-1, 1))}, unit=700)


def test_a_row_is_a_tensor_and_of_several_sites_a_tuple(store):
    rows = store.dataset("h.3")
    assert len(rows) == sum(LENGTHS)
    assert rows[7].equal(store["h.3"][7])
    assert [value.dtype for value in store.dataset("h.3", "h.4")[7]] == [torch.bfloat16, torch.float32]
    assert rows[[3, 1]].equal(store["h.3"][[3, 1]])


def test_a_batch_of_a_loader_is_one_gather(store, monkeypatch):
    gathers = []
    gather = type(store["h.3"])._gather
    monkeypatch.setattr(type(store["h.3"]), "_gather", lambda rows, index: gathers.append(1) or gather(rows, index))
    batches = list(DataLoader(store.dataset("h.3"), batch_size=16))
    assert len(gathers) == len(batches) == 3
    assert torch.cat(batches).equal(store["h.3"][:])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_shuffles_without_a_collate_function(store, workers):
    batches = list(DataLoader(store.dataset("h.3"), batch_size=16, shuffle=True, num_workers=workers))
    assert [batch.shape for batch in batches] == [(16, 3), (16, 3), (14, 3)]
    assert batches[0].dtype is torch.bfloat16
    shuffled = torch.cat(batches)[:, 0].long()
    assert sorted(shuffled.tolist()) == list(range(46))
    assert torch.cat(batches).equal(store["h.3"][shuffled])
    assert shuffled.tolist() != list(range(46))


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_of_several_sites_stay_together(store, workers):
    for loader in (
        DataLoader(store.dataset("h.3", "h.4"), batch_size=8, shuffle=True, num_workers=workers),
        DataLoader(store.dataset("h.3", "h.4", shuffle=True), batch_size=8, num_workers=workers),
    ):
        batches = list(loader)
        assert sum(len(one) for one, _ in batches) == 46
        assert all(one.float().add(1).equal(other) for one, other in batches)


def test_a_batch_is_a_sequence_of_rows_for_everybody(store):
    batch = store.dataset("h.3").__getitems__([4, 2, 9])
    expected = store["h.3"][[4, 2, 9]]
    assert len(batch) == 3
    assert [row.equal(value) for row, value in zip(batch, expected, strict=True)] == [True] * 3
    assert batch[-1].equal(expected[2])
    assert torch.stack(batch[:2]).equal(expected[:2])
    assert torch.stack(batch, 1).equal(expected.t())
    assert torch.stack(list(batch), dim=0).equal(expected)
    assert torch.cat(batch).equal(expected.flatten())
    assert default_collate(batch).equal(expected)
    out = torch.empty_like(expected)
    assert torch.stack(batch, 0, out=out) is out
    assert out.equal(expected)


@pytest.mark.process
@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.bool, torch.complex64, torch.int8, torch.float16], ids=lambda dtype: str(dtype)
)
def test_rows_of_any_dtype_pass_through_workers(tmp_path, dtype):
    rows = (torch.randn(40, 6) * 3).to(dtype)
    store = made(tmp_path, {"h": list(rows.split(4))})
    plain = torch.cat(list(DataLoader(store.dataset("h"), batch_size=16, num_workers=1)))
    shuffled = torch.cat(list(DataLoader(store.dataset("h", shuffle=True), batch_size=16, num_workers=1)))
    assert plain.dtype is shuffled.dtype is dtype
    assert plain.view(torch.uint8).equal(rows.view(torch.uint8))
    ours, theirs = (Counter(map(tuple, some.view(torch.uint8).tolist())) for some in (shuffled, rows))
    assert ours == theirs


def test_sites_whose_rows_are_not_the_same_are_refused(store):
    for shuffle in (False, True):
        with pytest.raises(hl.StoreError, match=says("are not of the same", "h.3", "label")):
            store.dataset("h.3", "label", shuffle=shuffle)
    with pytest.raises(hl.NotCaptured, match=says("did you mean")):
        store.dataset("h.33")


def test_whole_samples_keep_their_lengths(store):
    samples = store.dataset("h.3", "label", samples=True)
    assert len(samples) == len(LENGTHS)
    assert [len(rows) for rows, _ in samples] == LENGTHS
    assert samples[3][0].equal(store.rows("h.3", sample=3))
    batch = samples.__getitems__([6, 2, 0])
    assert [(len(rows), int(label)) for rows, label in batch] == [(9, 6), (0, 2), (5, 0)]
    assert batch[0][0].equal(store.rows("h.3", sample=6))
    loader = DataLoader(
        store.dataset("h.3", samples=True), batch_size=4, collate_fn=lambda some: pad_sequence(some, batch_first=True)
    )
    assert [batch.shape for batch in loader] == [(4, 7, 3), (4, 9, 3), (3, 8, 3)]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_an_epoch_has_every_row_once_whoever_reads_it(counted, workers):
    dataset = counted.dataset("n", shuffle=True, window=4096)
    loader = DataLoader(dataset, batch_size=64, num_workers=workers)
    first, second = numbers_in(loader), numbers_in(loader)
    assert sorted(first) == sorted(second) == list(range(5000))
    assert first != second
    assert first != sorted(first)


@pytest.mark.process
@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_workers_that_persist_have_a_new_order_each_epoch_too(counted, context):
    dataset = counted.dataset("n", shuffle=True, window=4096)
    processes = prepared_processes() if context == "forkserver" else context
    options = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": processes}
    loader = DataLoader(dataset, batch_size=50, **options)
    epochs = [numbers_in(loader) for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(5000))] * 3
    assert len(set(map(tuple, epochs))) == 3
    dataset.set_epoch(1)
    assert numbers_in(loader) == epochs[1]
    del loader


def test_the_order_follows_from_the_seed_and_the_epoch(counted):
    def epochs(workers, count=2, **options):
        loader = DataLoader(counted.dataset("n", shuffle=True, **options), batch_size=100, num_workers=workers)
        return [numbers_in(loader) for _ in range(count)]

    alone, by_two = epochs(0, count=3), epochs(2)
    assert epochs(0, count=3) == alone
    assert epochs(2) == by_two
    assert epochs(0, seed=1) != alone[:2]
    dataset = counted.dataset("n", shuffle=True)
    dataset.set_epoch(2)
    assert numbers_in(dataset) == alone[2]
    assert numbers_in(dataset) not in alone  # The epoch after it.


@pytest.mark.process
def test_two_loaders_of_one_dataset_at_once_lose_nothing(counted):
    dataset = counted.dataset("n", shuffle=True, window=4096)
    loaders = [DataLoader(dataset, batch_size=64, num_workers=2) for _ in range(2)]
    found = list(zip(*loaders, strict=True))
    for side in range(2):
        assert sorted(numbers_in(pair[side] for pair in found)) == list(range(5000))


@pytest.mark.parametrize(("world", "workers"), [(2, 0), (3, 0), (7, 0), (2, 2)])
def test_ranks_share_the_rows_without_overlap(counted, world, workers):
    datasets = [counted.dataset("n", shuffle=True, rank=rank, world=world) for rank in range(world)]
    for _ in range(2):
        found = [numbers_in(DataLoader(dataset, batch_size=64, num_workers=workers)) for dataset in datasets]
        assert [len(part) for part in found] == [len(dataset) for dataset in datasets]
        assert max(map(len, found)) - min(map(len, found)) <= 1
        assert sorted(joined(found)) == list(range(5000))


def test_even_ranks_have_equally_many_rows(counted):
    datasets = [counted.dataset("n", shuffle=True, rank=rank, world=7, even=True) for rank in range(7)]
    dropped = []
    for _ in range(2):
        found = [numbers_in(dataset) for dataset in datasets]
        assert {len(part) for part in found} == {5000 // 7} == {len(dataset) for dataset in datasets}
        assert len(set(joined(found))) == 4998
        dropped.append(set(range(5000)) - set(joined(found)))
    assert dropped[0] != dropped[1]


def test_rank_and_world_come_from_torchrun_or_the_process_group(counted, monkeypatch, tmp_path):
    assert len(counted.dataset("n", shuffle=True)) == 5000
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert repr(counted.dataset("n", shuffle=True)) == "ShuffledRows('n', 1,250 rows, rank 1 of 4)"
    assert len(counted.dataset("n", shuffle=True, rank=0, world=1)) == 5000
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        assert len(counted.dataset("n", shuffle=True)) == 5000
    finally:
        torch.distributed.destroy_process_group()


def test_rank_and_world_come_from_srun(counted, monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert repr(counted.dataset("n", shuffle=True)) == "ShuffledRows('n', 1,250 rows, rank 1 of 4)"
    monkeypatch.setenv("SLURM_PROCID", "one")
    with pytest.raises(hl.HooklineError, match=says("are not a rank and a")):
        counted.dataset("n", shuffle=True)


@pytest.mark.process
def test_a_loader_knows_how_many_batches_its_workers_make(tmp_path):
    store = made(tmp_path, {"n": list(torch.arange(70_000).view(-1, 1).split(100))}, unit=100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in (64, 1024):
            loader = DataLoader(store.dataset("n", shuffle=True), batch_size=size, num_workers=2)
            assert len(list(loader)) == len(loader) == -(-70_000 // size)


def test_a_window_mixes_rows_of_many_places(tmp_path):
    store = made(tmp_path, {"n": list(torch.arange(20_000).view(-1, 1).split(100))}, unit=20)
    epoch = torch.tensor(numbers_in(store.dataset("n", shuffle=True, window=32_768)))
    units = epoch.view(-1, 500) // 2000
    assert min(len(some.unique()) for some in units) >= 6  # Any 500 consecutive rows come from six units of ten.
    whole = torch.tensor(numbers_in(store.dataset("n", shuffle=True)))
    assert abs(torch.corrcoef(torch.stack([whole.double(), torch.arange(20_000).double()]))[0, 1]) < 0.05


def test_a_dataset_that_was_pickled_or_copied_goes_on_counting(counted):
    dataset = counted.dataset("n", shuffle=True)
    first = numbers_in(dataset)
    twin = pickle.loads(pickle.dumps(dataset))
    second = numbers_in(twin)
    assert sorted(second) == sorted(first)
    assert second != first
    twin.set_epoch(0)
    assert numbers_in(copy.deepcopy(dataset)) == first
    rows = pickle.loads(pickle.dumps(counted.dataset("n")))
    assert rows[4321] == 4321


def _iterate(dataset, queue):
    queue.put(numbers_in(dataset))


@pytest.mark.process
def test_epochs_are_counted_over_processes(counted):
    dataset, here = counted.dataset("n", shuffle=True), counted.dataset("n", shuffle=True)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    processes = [context.Process(target=_iterate, args=(dataset, queue)) for _ in range(3)]
    for process in processes:
        process.start()
    found = [queue.get() for _ in processes]
    for process in processes:
        process.join()
    found.append(numbers_in(dataset))
    epochs = [numbers_in(here) for _ in range(4)]
    assert sorted(found[:3]) == sorted(epochs[:3])
    assert found[3] == epochs[3]


def test_a_row_that_is_kept_holds_little_and_is_nobody_elses(counted):
    dataset = counted.dataset("n", shuffle=True)
    rows = iter(dataset)
    one, other = next(rows), next(rows)
    assert one.untyped_storage().nbytes() <= 1024 * 8
    before = other.clone()
    one.zero_()
    assert other.equal(before)
    assert counted["n"][:].flatten().equal(torch.arange(5000))


def test_options_that_mean_nothing_are_refused(store):
    for options, message in {
        "seed=1": says("seed= is for shuffle=True"),
        "rank=0, world=1": says("rank= is for shuffle=True"),
        "even=True": says("even= is for shuffle=True"),
        "shuffle=True, rank=1": says("rank= and world= go together"),
        "shuffle=True, rank=2, world=2": "no rank 2 of 2",
        "shuffle=True, window=0": says("is not a number of bytes", 0),
        "shuffle=True, samples=True": says("DataLoader store dataset samples=True shuffle=True"),
    }.items():
        with pytest.raises(hl.HooklineError, match=message):
            eval(f"store.dataset('h.3', {options})")


def test_an_empty_array_gives_an_empty_dataset(tmp_path):
    store = made(tmp_path, {"h": [torch.zeros(0, 3)] * 5})
    assert list(DataLoader(store.dataset("h"), batch_size=4)) == []
    assert list(DataLoader(store.dataset("h", shuffle=True), batch_size=4)) == []
