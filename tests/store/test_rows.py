"""Rows come back bit for bit, by any index, whatever order and units they were stored in."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hookline import Store
from hookline._store.disk_format import Array
from tests.errors.wording import says
from tests.support.stores import DTYPES, Plan, bits, expected, join, same, take, write

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # No waiting for the disk.

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")


@st.composite
def stores(draw):
    """Draw some arrays and the rows that each unit holds."""
    shapes = st.lists(st.integers(0, 3), max_size=2).map(tuple)
    arrays = tuple(
        Array(f"h.{number}", draw(st.sampled_from(DTYPES)), draw(shapes)) for number in range(draw(st.integers(1, 3)))
    )
    ragged = [draw(st.booleans()) for _ in arrays]
    plans = [draw(units(arrays, ragged)) for _ in range(draw(st.integers(0, 4)))]
    return arrays, plans


@st.composite
def units(draw, arrays, ragged):
    samples = draw(st.integers(0, 5))
    skipped = draw(st.sets(st.integers(0, samples - 1), max_size=2)) if samples else set()
    stored = [offset for offset in range(samples) if offset not in skipped]
    seed = draw(st.integers(0, 1000))
    rows = []
    for array, is_ragged in zip(arrays, ragged, strict=True):
        lengths = {offset: draw(st.integers(0, 4)) if is_ragged else 1 for offset in stored}
        rows.append({offset: bits(lengths[offset], array.shape, array.dtype, seed + offset) for offset in stored})
    order = draw(st.none() | st.permutations(stored))
    positions = {offset: torch.randint(0, 99, (len(rows[0][offset]),)) for offset in stored}
    return Plan(
        samples,
        rows,
        order,
        dict.fromkeys(skipped, "bad"),
        draw(st.none() | st.just(positions)),
        draw(st.integers(1, 3)),
    )


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(stores(), st.data())
def test_what_goes_in_comes_out(drawn, data):
    arrays, plans = drawn
    with tempfile.TemporaryDirectory(dir=MEMORY) as path:
        write(path, arrays, plans)
        store = Store(path)
        assert list(store) == [array.name for array in arrays]
        assert store.samples == sum(plan.samples for plan in plans)
        for number, array in enumerate(arrays):
            check_rows(store, array, *expected(plans, number), data)
        store.verify()


def check_rows(store, array, numbers, samples, positions, data):
    rows = store[array.name]
    whole = join(samples, array)
    labels = torch.tensor([number for number, sample in zip(numbers, samples, strict=True) for _ in sample])
    assert (rows.shape, rows.dtype, len(rows)) == (whole.shape, whole.dtype, len(whole))
    assert same(rows[:], whole)
    assert rows.samples[:].tolist() == labels.tolist()
    assert rows.positions[:].tolist() == torch.cat([torch.empty(0), *positions]).tolist()
    for number, sample in zip(numbers, samples, strict=True):
        assert same(store.rows(array.name, sample=number), sample)
    assert same(join(list(rows.scan(data.draw(st.integers(1, 100)))), array), whole)
    chosen = data.draw(st.slices(len(whole)))
    reference = torch.arange(len(whole)).numpy()[chosen]
    assert same(rows[chosen], take(whole, reference.copy()))
    assert rows.samples[chosen].tolist() == labels.numpy()[chosen].tolist()
    if len(whole):
        wanted = data.draw(st.lists(st.integers(-len(whole), len(whole) - 1), max_size=12))
        assert same(rows[wanted], take(whole, torch.tensor(wanted, dtype=torch.int64)))
        assert same(rows[wanted[0]], whole[wanted[0]]) if wanted else True
        assert rows.samples[wanted].tolist() == labels[torch.tensor(wanted, dtype=torch.int64)].tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_read_bit_for_bit(tmp_path, dtype):
    array = Array("h", dtype, (3, 5))
    rows = bits(40, array.shape, dtype, 1)
    write(tmp_path, (array,), [Plan(40, [dict(enumerate(rows.split(1)))])])
    store = Store(tmp_path)
    assert same(store["h"][:], rows)
    assert same(store["h"][[3, 1, 39]], take(rows, [3, 1, 39]))


LARGE = Array("h.0", torch.float32, (256,))


def large(path, units=3, rows=2000):
    """Write a store whose units are too large to be copied."""
    values = torch.randn(units, rows, 256)
    write(path, (LARGE,), [Plan(rows, [dict(enumerate(unit.split(1)))]) for unit in values])
    return values.view(-1, 256)


@pytest.fixture(scope="module")
def read_only(tmp_path_factory):
    path = tmp_path_factory.mktemp("large")
    return path, large(path)


INDICES = [0, slice(0, 10), slice(0, 1900), slice(1900, 4100), [5, 1, 2500], slice(0, 99, 7)]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_writing_to_what_was_read_changes_neither_the_file_nor_another_read(read_only, index):
    path, values = read_only
    rows = Store(path)["h.0"]
    found = rows[index]
    other = rows[index]
    found.fill_(7)
    assert same(other, values[index])
    assert same(rows[index], values[index])
    assert Store(path).verify()


def test_chunks_of_a_scan_may_be_written_to(read_only):
    path, values = read_only
    rows = Store(path)["h.0"]
    for chunk in rows.scan(100_000):
        assert chunk.nbytes <= 100_000
        chunk.zero_()
    assert same(torch.cat(list(rows.scan())), values)
    assert all(row.shape == (256,) for row in rows)


def test_a_large_slice_of_one_unit_is_mapped_and_not_copied(read_only):
    before = resident()
    found = Store(read_only[0])["h.0"][:2000]
    assert found.nbytes == 2_048_000
    assert found.untyped_storage().nbytes() == 4096 + 2_048_000
    assert resident() - before < 1_000_000


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize(
    ("index", "plain"),
    [
        (torch.tensor([1, -1, 4000]), [1, 5999, 4000]),
        (torch.tensor([3], dtype=torch.int16), [3]),
        (np.array([7, 3000]), [7, 3000]),
        (range(5, 3000, 500), [5, 505, 1005, 1505, 2005, 2505]),
        ([], []),
        (torch.tensor(3), 3),
        (np.int64(-2), 5998),
        ([False, True, *[False] * 5998], [1]),
        (torch.arange(6000) % 2000 == 1, [1, 2001, 4001]),
    ],
    ids=str,
)
def test_rows_are_chosen_as_of_a_tensor(read_only, index, plain):
    path, values = read_only
    wanted = values[plain] if plain else values[:0]
    assert same(Store(path)["h.0"][index], wanted)


@pytest.mark.parametrize("index", [6000, -6001, [0, 6000], torch.tensor([-6001]), [True, False]], ids=str)
def test_a_row_that_is_not_there_is_an_index_error(read_only, index):
    with pytest.raises(IndexError, match="6,000"):
        Store(read_only[0])["h.0"][index]


@pytest.mark.parametrize("index", [..., None, (0, 1), 1.5, "0", True, [1.5], [[1]], {1}, torch.tensor(True)], ids=str)
def test_what_chooses_no_rows_is_refused_in_words(read_only, index):
    with pytest.raises(TypeError, match=says("rows are chosen by")):
        Store(read_only[0])["h.0"][index]


def test_a_random_batch_of_a_few_large_units_is_right(read_only):
    path, values = read_only
    for index in (torch.randint(6000, (500,)), torch.arange(0, 6000, 7), torch.arange(5999, 0, -7)):
        assert same(Store(path)["h.0"][index], values[index])


def test_a_random_batch_of_many_small_units_is_right(tmp_path):
    values = torch.randn(64, 3, 5)
    write(tmp_path, (Array("h", torch.float32, (5,)),), [Plan(3, [dict(enumerate(unit.split(1)))]) for unit in values])
    rows = Store(tmp_path)["h"]
    for _ in range(3):
        index = torch.randint(192, (100,))
        assert same(rows[index], values.view(-1, 5)[index])


def test_no_file_stays_open(tmp_path):
    values = torch.randn(16, 3, 5)
    write(tmp_path, (Array("h", torch.float32, (5,)),), [Plan(3, [dict(enumerate(unit.split(1)))]) for unit in values])
    store = Store(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    assert same(store["h"][torch.arange(47, -1, -1)], values.view(-1, 5).flip(0))
    assert len(os.listdir("/proc/self/fd")) == before


def test_where_nothing_can_be_mapped_rows_are_read(read_only, monkeypatch):
    def refuse(*arguments, **options):
        raise RuntimeError("unable to mmap: Cannot allocate memory (12)")

    path, values = read_only
    monkeypatch.setattr(torch.UntypedStorage, "from_file", refuse)
    rows = Store(path)["h.0"]
    assert same(rows[1000:5000], values[1000:5000])
    assert same(rows[[1, 5000]], values[[1, 5000]])


def sums(rows, queue):
    queue.put((rows[:].sum().item(), rows[[0, 5999]].sum().item()))


@pytest.mark.process
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_another_process_reads_the_same(read_only, method):
    rows = Store(read_only[0])["h.0"]
    wanted = (rows[:].sum().item(), rows[[0, 5999]].sum().item())
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    process = context.Process(target=sums, args=(rows, queue))
    process.start()
    found = queue.get()
    process.join()
    assert found == wanted


def test_a_store_is_pickled_without_what_it_mapped(read_only):
    path, values = read_only
    store = Store(path)
    store["h.0"][:]
    assert len(pickle.dumps(store)) < 10_000
    assert len(pickle.dumps(store["h.0"])) < 10_000
    assert same(pickle.loads(pickle.dumps(store))["h.0"][5:7], values[5:7])


def test_reading_under_a_default_device_or_in_inference_mode_stays_on_the_cpu(read_only):
    path, values = read_only
    with torch.device("meta"):
        rows = Store(path)["h.0"]
        assert same(rows[[5, 4000]], values[[5, 4000]])
        assert rows.samples[5:7].tolist() == [5, 6]
        assert same(rows[1900:2100], values[1900:2100])
    with torch.inference_mode():
        rows = Store(path)["h.0"]
        rows[5], rows.samples[5]
    rows[5].requires_grad_().sum().backward()
