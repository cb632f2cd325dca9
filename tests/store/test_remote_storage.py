"""Stores that are not in a local folder: in memory, and on a real S3 server on this machine."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from torch.utils.data import DataLoader

import hookline as hl
from hookline import Store
from hookline._store.disk_format import Array
from tests.errors.wording import says
from tests.support.prepared_processes import prepared_processes
from tests.support.quick_python import quick_python
from tests.support.running import environment
from tests.support.stores import Writing, leftovers_removed, made, tokens

fsspec = pytest.importorskip("fsspec")
PAIRS = Array("h", torch.float32, (2,))
LENGTHS = [5, 1, 0, 7, 3, 2, 9, 4, 6, 1, 8]


class Server:
    """moto's S3 server on a free port, one request at a time: its check before a put is not atomic, unlike S3's."""

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.moto = DomainDispatcherApplication(create_backend_app)
        self.ignores_conditions = False
        self.answers_to_lose = 0
        self.ranges: list[int] = []  # How many bytes were asked for at a time.
        self.server = make_server("127.0.0.1", 0, self, threaded=False)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __call__(self, environ, start_response):
        if "HTTP_RANGE" in environ:
            first, last = environ["HTTP_RANGE"].removeprefix("bytes=").split("-")
            self.ranges.append(int(last) + 1 - int(first))
        if environ["REQUEST_METHOD"] == "PUT":
            if self.ignores_conditions:
                environ.pop("HTTP_IF_NONE_MATCH", None)
            if self.answers_to_lose and environ["PATH_INFO"].endswith(".json"):
                self.answers_to_lose -= 1
                list(self.moto(environ, lambda *_: None))
                start_response("503 Service Unavailable", [])
                return [b""]
        return self.moto(environ, start_response)


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    found = Server()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            patch.setenv(name, os.devnull)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", found.url)
        yield found
        system = fsspec.filesystem("s3")
        fsspec.asyn.sync(system.loop, system._s3.close)
        type(system).clear_instance_cache()
    found.server.shutdown()
    found.server.server_close()


@pytest.fixture
def bucket(server):
    """A new bucket: "s3://..."."""
    system, name = fsspec.filesystem("s3"), f"bucket-{os.urandom(4).hex()}"
    system.mkdir(name)
    yield f"s3://{name}"
    system.rm(name, recursive=True)


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.process)])
def url(request):
    """The URL of a folder that does not exist yet."""
    if request.param == "s3":
        yield f"{request.getfixturevalue('bucket')}/acts"
        return
    name = f"memory://{os.urandom(4).hex()}/acts"
    yield name
    with suppress(FileNotFoundError):
        fsspec.filesystem("memory").rm(name.rpartition("/")[0], recursive=True)


def names(url):
    """Return the names of all objects of a store, as seen from it."""
    system, path = fsspec.core.url_to_fs(url)
    system.invalidate_cache()
    root = path.strip("/")
    return sorted(name.strip("/").removeprefix(f"{root}/") for name in system.find(path))


def remove(url, name):
    """Remove an object of a store."""
    system, path = fsspec.core.url_to_fs(url)
    system.rm(f"{path}/{name}")


def written(unit, value=1.0):
    """Fill a unit, and return True if it was committed."""
    unit.append(0, torch.full((3, 2), value))
    return unit.commit(first=0, samples=3, lengths=[1])


def test_of_many_who_finish_a_unit_at_once_one_does(url):
    writing = Writing(url, [PAIRS])
    with ThreadPoolExecutor(8) as pool:
        created = list(pool.map(lambda number: written(writing.unit(), float(number)), range(8)))
    assert sum(created) == 1
    assert Store(url)["h"][:].eq(created.index(True)).all()
    assert len(names(url)) == 3  # The manifest, a record and a file.


def test_a_store_elsewhere_reads_as_one_here(url, tmp_path):
    arrays = {"h.3": tokens(LENGTHS), "flag": [torch.tensor([number % 2 == 0]) for number in range(len(LENGTHS))]}
    here, there = made(tmp_path, arrays), made(url, arrays)
    assert repr(there) == repr(here)
    for name in arrays:
        ours, theirs = there[name], here[name]
        rows = torch.randperm(len(theirs))[:9]
        for index in (0, -1, slice(None), slice(3, 9), slice(2, 40, 3), rows, rows.tolist(), [0, 0, 1]):
            assert ours[index].equal(theirs[index])
        assert torch.cat(list(ours.scan(16))).equal(theirs[:])
        assert ours.samples[:].equal(theirs.samples[:])
        ours[2:5].zero_()  # The rows are a copy.
        assert ours[:].equal(theirs[:])
    assert there.rows("h.3", sample=6).equal(here.rows("h.3", sample=6))
    assert there.verify().files == 6
    batch = next(iter(DataLoader(there.dataset("h.3"), batch_size=64)))
    assert batch.equal(here["h.3"][:])


@pytest.mark.process
def test_a_gather_asks_for_what_it_needs_and_for_neighbours_together(bucket, server):
    store = made(f"{bucket}/acts", {"h": tokens([4000] * 2, width=256)}, unit=2)  # 4 MB.
    server.ranges.clear()
    wanted = [7000, 10, 12, 3500, 11]
    assert store["h"][wanted][:, 0].long().tolist() == [number % 256 for number in wanted]
    assert sorted(server.ranges) == [512, 512, 3 * 512]


@pytest.mark.process
def test_a_large_part_comes_in_several_pieces(bucket, server):
    values = tokens([3000, 2000], width=2048)  # 20 MB.
    store = made(f"{bucket}/acts", {"h": values})
    server.ranges.clear()
    assert store["h"][:].equal(torch.cat(values))
    assert len(server.ranges) > 2
    assert sum(server.ranges) == 5000 * 4096


class Environment:
    """The environment of this process, with the address of the server, for a loader's processes."""

    def __init__(self) -> None:
        self.found = dict(os.environ)

    def __call__(self, worker: int) -> None:
        os.environ.update(self.found)


@pytest.mark.process
@pytest.mark.parametrize("context", ["fork", pytest.param("forkserver", marks=pytest.mark.deep)])
def test_workers_read_from_elsewhere(bucket, context):
    rows = list(torch.arange(600).view(-1, 1).split(10))
    store = made(f"{bucket}/acts", {"n": rows}, unit=20)
    datasets = [store.dataset("n", shuffle=True), store.dataset("n")]
    for dataset in datasets if context == "fork" else datasets[:1]:
        processes = prepared_processes() if context == "forkserver" else context
        options = {"num_workers": 2, "multiprocessing_context": processes, "worker_init_fn": Environment()}
        loader = DataLoader(dataset, batch_size=50, **options)
        assert sorted(torch.cat(list(loader)).flatten().tolist()) == list(range(600))


def test_a_harvest_goes_there_and_goes_on_there(url):
    model, data = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU()).eval(), torch.randn(20, 3)
    batches = list(data.split(4))
    store = hl.harvest(model, batches, "0", to=url, unit=2)
    assert store["0"][:].equal(model[0](data).detach())
    remove(url, "units/00000001.json")
    with pytest.raises(hl.StoreError, match=says("run its harvest again to", "partial=True")):
        Store(url)
    assert hl.harvest(model, batches, "0", to=url, unit=2)["0"][:].equal(store["0"][:])


@pytest.mark.process
def test_an_answer_that_is_lost_does_not_lose_the_unit(bucket, server):
    unit = Writing(f"{bucket}/acts", [PAIRS]).unit()
    server.answers_to_lose = 1
    assert written(unit)
    assert server.answers_to_lose == 0
    assert Store(f"{bucket}/acts")["h"][:].equal(torch.ones(3, 2))


@pytest.mark.process
def test_a_server_that_creates_nothing_exclusively_is_refused(bucket, server):
    server.ignores_conditions = True
    try:
        with pytest.raises(hl.StoreError, match=says("its server ignores If None")):
            Writing(f"{bucket}/acts", [PAIRS])
    finally:
        server.ignores_conditions = False
    assert names(f"{bucket}/acts") == []


def test_of_two_attempts_elsewhere_the_second_leaves_nothing(url):
    writing = Writing(url, [PAIRS])
    attempts = [writing.unit() for _ in range(2)]
    assert [written(unit, float(number)) for number, unit in enumerate(attempts)] == [True, False]
    assert len(names(f"{url}/data")) == 1
    assert Store(url)["h"][:].equal(torch.zeros(3, 2))
    given_up = writing.unit()
    given_up.append(0, torch.ones(3, 2))
    given_up.discard()
    with pytest.raises(hl.StoreError, match=says("takes no more rows")):
        given_up.append(0, torch.ones(3, 2))
    assert len(names(f"{url}/data")) == 1


def test_a_sweep_takes_only_what_is_old(url, monkeypatch):
    store = made(url, {"h": tokens([2, 3])})
    name = f"data/0000/00000000-{'0' * 16}.safetensors"
    system, path = fsspec.core.url_to_fs(url)
    system.pipe_file(f"{path}/{name}", b"left by a killed writer")
    assert leftovers_removed(url) == []
    now = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now() + 2 * 24 * 3600)
        assert leftovers_removed(url) == [name]
    assert store.verify().files == 1


WRITER = """
import os, sys, torch
print(os.getpid(), flush=True)
import hookline as hl
from hookline._store.disk_format import Array
from tests.support.stores import Writing
writing = Writing(sys.argv[1], [Array("h", torch.float32, (64,)), Array("g", torch.int64, ())], 40)
try:
    done = hl.Store(sys.argv[1], partial=True)["g"][::100].tolist()
except hl.StoreError:
    done = []
for unit in sorted({*range(40)} - {*done}):
    attempt = writing.unit(unit)
    attempt.append(0, torch.full((100, 64), float(unit)))
    attempt.append(1, torch.full((100,), unit))
    attempt.commit(first=100 * unit, samples=100, lengths=[1, 1])
"""


def records(url):
    return [name for name in names(url) if name.startswith("units/")]


@pytest.mark.process
@pytest.mark.deep
def test_a_killed_writer_leaves_only_objects_that_no_record_names(bucket):
    url = f"{bucket}/acts"
    command = [*quick_python(), "-c", WRITER, url]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        writer = int(process.stdout.readline())
        while len(records(url)) < 7:
            assert process.poll() is None
        os.kill(writer, signal.SIGKILL)  # At an arbitrary moment.
    assert process.returncode == -signal.SIGKILL
    store, done = Store(url, partial=True), records(url)
    assert 7 <= len(done) < 40
    assert len(store["g"]) == 100 * len(done)
    assert store["h"][:].equal(store["g"][:].float().view(-1, 1).expand(-1, 64))
    store.verify()
    subprocess.run(command, env=environment(), check=True, capture_output=True)
    assert Store(url)["g"][:].equal(torch.arange(40).repeat_interleave(100))
    assert Store(url).verify().units == 40


@pytest.mark.process
def test_what_is_cached_here_is_not_asked_for_again(bucket, server, tmp_path, monkeypatch):
    rows = torch.cat(tokens(LENGTHS))
    made(f"{bucket}/acts", {"h": list(rows.split(LENGTHS))}, unit=100)
    monkeypatch.setitem(fsspec.config.conf, "simplecache", {"cache_storage": str(tmp_path)})
    cached = Store(f"simplecache::{bucket}/acts")
    assert cached["h"][[1, 30]].equal(rows[[1, 30]])
    with monkeypatch.context() as patch:
        patch.setattr(server, "moto", None)  # The server no longer answers.
        assert cached["h"][[2, 40]].equal(rows[[2, 40]])
        assert cached["h"][:].equal(rows)


def test_a_file_url_is_a_folder_of_this_machine(tmp_path):
    store = made(f"file://{tmp_path}/acts", {"h": tokens([2, 3])})
    assert Store(tmp_path / "acts")["h"][:].equal(store["h"][:])


@pytest.mark.process
def test_what_cannot_be_reached_is_told_in_words(bucket, monkeypatch):
    with pytest.raises(hl.StoreError, match=says("is not a store it", "s3://no-such-bucket/acts")):
        Store("s3://no-such-bucket/acts")
    with pytest.raises(hl.StoreError, match=says("json' was not written The")):
        made("s3://no-such-bucket/acts", {"h": tokens([2, 3])})
    with pytest.raises(hl.StoreError, match=says("can't be opened", "nowhere://acts")):
        Store("nowhere://acts")
    with pytest.raises(hl.StoreError, match=says("can be read")):
        Writing(f"simplecache::{bucket}/acts", [PAIRS])
    store = made(f"{bucket}/acts", {"h": tokens([2, 3])})
    (name,) = (name for name in names(f"{bucket}/acts") if name.startswith("data/"))
    remove(f"{bucket}/acts", name)
    with pytest.raises(hl.StoreError, match=says("can't be read")):
        store["h"][0]
    with pytest.raises(hl.StoreError, match=name):
        Store(f"{bucket}/acts")


@pytest.mark.parametrize(("module", "extra"), [("fsspec.core", "remote"), ("s3fs", "s3")])
def test_a_package_that_is_missing_is_named(module, extra, monkeypatch):
    from fsspec.registry import _registry  # The file systems that fsspec has imported.

    _registry.pop("s3", None)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(hl.HooklineError, match=rf"pip install 'hookline\[{extra}\]'"):
        Store("s3://bucket/acts")
