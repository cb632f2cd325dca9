"""Stores that are not in a local folder: in memory, and on a real S3 server on this machine."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from torch.utils.data import DataLoader

import hookline as hl
from hookline._store import remote_storage
from hookline._store.disk_format import Array, Manifest, committed
from hookline._store.remote_storage import RemoteStorage
from hookline._store.storage import open_storage
from hookline._store.store import Store
from hookline._store.writer import Unit, begin, remove_leftovers
from tests.support.prepared_processes import prepared_processes
from tests.support.quick_python import quick_python
from tests.support.running import environment
from tests.support.stores import made, tokens

fsspec = pytest.importorskip("fsspec")
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
        self.puts = 0
        self.server = make_server("127.0.0.1", 0, self, threaded=False)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __call__(self, environ, start_response):
        if environ["REQUEST_METHOD"] == "PUT":
            self.puts += 1
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


@pytest.fixture(params=["memory", "s3"])
def url(request):
    """The URL of a folder that does not exist yet."""
    if request.param == "s3":
        yield f"{request.getfixturevalue('bucket')}/acts"
        return
    name = f"memory://{os.urandom(4).hex()}/acts"
    yield name
    with suppress(FileNotFoundError):
        fsspec.filesystem("memory").rm(name.rpartition("/")[0], recursive=True)


def test_a_file_is_created_once(url):
    root = open_storage(url)
    assert root.names("") == root.names("units") == []
    assert root.create("units/a.json", b"one")
    assert not root.create("units/a.json", b"two")
    assert root.read("units/a.json") == b"one"
    assert root.read("units/a.json", 1, 1) == b"n"
    assert root.names("") == ["units"]
    assert root.names("units") == ["a.json"]
    assert root.sizes("units") == {"a.json": 3}
    root.remove("units/a.json")
    root.remove("units/a.json")
    with pytest.raises(FileNotFoundError):
        root.read("units/a.json")


def test_of_many_who_create_at_once_one_does(url):
    root = open_storage(url)
    with ThreadPoolExecutor(8) as pool:
        for name in ("a", "b", "c"):
            created = list(pool.map(lambda number, name=name: root.create(name, b"%d" % number), range(8)))
            assert sum(created) == 1
            assert root.read(name) == b"%d" % created.index(True)


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


def test_a_gather_asks_for_what_it_needs_and_for_neighbours_together(bucket, monkeypatch):
    store = made(f"{bucket}/acts", {"h": tokens([4000] * 2, width=256)}, unit=2)  # 4 MB.
    asked, rows = [], RemoteStorage.rows
    monkeypatch.setattr(RemoteStorage, "rows", lambda *args: asked.append(args[3]) or rows(*args))
    wanted = [7000, 10, 12, 3500, 11]
    assert store["h"][wanted][:, 0].long().tolist() == [number % 256 for number in wanted]
    assert sorted(asked) == [512, 512, 3 * 512]


def test_a_large_part_comes_in_several_pieces(url, monkeypatch):
    monkeypatch.setattr(remote_storage, "_RANGE", 1000)
    values = tokens([700, 500], width=4)
    assert made(url, {"h": values})["h"][:].equal(torch.cat(values))


class Environment:
    """The environment of this process, with the address of the server, for a loader's processes."""

    def __init__(self) -> None:
        self.found = dict(os.environ)

    def __call__(self, worker: int) -> None:
        os.environ.update(self.found)


@pytest.mark.parametrize("context", ["fork", "forkserver"])
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
    open_storage(url).remove("units/00000001.json")
    with pytest.raises(hl.StoreError, match="partial=True"):
        Store(url)
    assert hl.harvest(model, batches, "0", to=url, unit=2)["0"][:].equal(store["0"][:])


def test_an_answer_that_is_lost_does_not_lose_the_unit(bucket, server):
    root = open_storage(f"{bucket}/acts")
    manifest = begin(root, Manifest({}, (Array("h", torch.float32, (2,)),), 1))
    unit = Unit(root, manifest, 0)
    unit.append(0, torch.ones(3, 2))
    server.answers_to_lose = 1
    assert unit.commit(first=0, samples=3, lengths=[1])
    assert server.answers_to_lose == 0
    assert Store(f"{bucket}/acts")["h"][:].equal(torch.ones(3, 2))


def test_a_server_that_creates_nothing_exclusively_is_refused(bucket, server):
    server.ignores_conditions = True
    try:
        with pytest.raises(hl.StoreError, match="its server ignores If-None-Match, so two writers could not be told"):
            open_storage(f"{bucket}/acts").create("a", b"one")
    finally:
        server.ignores_conditions = False
    assert open_storage(bucket).names("acts") == []


def test_of_two_attempts_elsewhere_the_second_leaves_nothing(url):
    root = open_storage(url)
    manifest = begin(root, Manifest({}, (Array("h", torch.float32, (2,)),), 1))
    attempts = [Unit(root, manifest, 0) for _ in range(2)]
    for number, unit in enumerate(attempts):
        unit.append(0, torch.full((3, 2), float(number)))
    assert [unit.commit(first=0, samples=3, lengths=[1]) for unit in attempts] == [True, False]
    assert len(root.names("data/0000")) == 1
    assert Store(url)["h"][:].equal(torch.zeros(3, 2))
    given_up = Unit(root, manifest, 0)
    given_up.append(0, torch.ones(3, 2))
    given_up.discard()
    with pytest.raises(hl.StoreError, match="takes no more rows"):
        given_up.append(0, torch.ones(3, 2))
    assert len(root.names("data/0000")) == 1


def test_a_sweep_takes_only_what_is_old(url, monkeypatch):
    store = made(url, {"h": tokens([2, 3])})
    root = open_storage(url)
    name = f"data/0000/00000000-{'0' * 16}.safetensors"
    root.create(name, b"left by a killed writer")
    assert remove_leftovers(root) == []
    monkeypatch.setattr(remote_storage, "_STALE", -60)
    assert remove_leftovers(root) == [name]
    assert store.verify().files == 1


WRITER = """
import os, sys, torch
print(os.getpid(), flush=True)
from hookline._store.storage import open_storage
from hookline._store.disk_format import Array, Manifest
from hookline._store.writer import begin
from hookline._store.disk_format import committed
from hookline._store.writer import Unit
root = open_storage(sys.argv[1])
manifest = begin(root, Manifest({}, (Array("h", torch.float32, (64,)), Array("g", torch.int64, ())), 40))
for unit in sorted(set(range(40)) - committed(root)):
    attempt = Unit(root, manifest, unit)
    attempt.append(0, torch.full((100, 64), float(unit)))
    attempt.append(1, torch.full((100,), unit))
    attempt.commit(first=100 * unit, samples=100, lengths=[1, 1])
"""


def test_a_killed_writer_leaves_only_objects_that_no_record_names(bucket):
    url = f"{bucket}/acts"
    command = [*quick_python(), "-c", WRITER, url]
    root = open_storage(url)
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        writer = int(process.stdout.readline())
        while len(committed(root)) < 7:
            assert process.poll() is None
        os.kill(writer, signal.SIGKILL)  # At an arbitrary moment.
    assert process.returncode == -signal.SIGKILL
    store = Store(url, partial=True)
    assert 7 <= len(committed(root)) < 40
    assert len(store["g"]) == 100 * len(committed(root))
    assert store["h"][:].equal(store["g"][:].float().view(-1, 1).expand(-1, 64))
    store.verify()
    subprocess.run(command, env=environment(), check=True, capture_output=True)
    assert Store(url)["g"][:].equal(torch.arange(40).repeat_interleave(100))
    assert Store(url).verify().units == 40


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


def test_what_cannot_be_reached_is_told_in_words(bucket, monkeypatch):
    with pytest.raises(hl.StoreError, match=r"'s3://no-such-bucket/acts' is not a store"):
        Store("s3://no-such-bucket/acts")
    with pytest.raises(
        hl.StoreError, match=r"harvest.json' was not written: The specified bucket does not exist; check"
    ):
        made("s3://no-such-bucket/acts", {"h": tokens([2, 3])})
    with pytest.raises(hl.StoreError, match=r"'nowhere://acts' can't be opened: Protocol not known: nowhere"):
        Store("nowhere://acts")
    with pytest.raises(
        hl.StoreError, match=r"can be read, but not written to: simplecache creates no file exclusively"
    ):
        open_storage(f"simplecache::{bucket}/acts").create("a", b"one")
    store = made(f"{bucket}/acts", {"h": tokens([2, 3])})
    name = open_storage(f"{bucket}/acts").names("data/0000")[0]
    open_storage(f"{bucket}/acts").remove(f"data/0000/{name}")
    with pytest.raises(hl.StoreError, match="can't be read"):
        store["h"][0]
    with pytest.raises(hl.StoreError, match=name):
        Store(f"{bucket}/acts")


@pytest.mark.parametrize(("module", "extra"), [("fsspec.core", "remote"), ("s3fs", "s3")])
def test_a_package_that_is_missing_is_named(module, extra, monkeypatch):
    from fsspec.registry import _registry  # The file systems that fsspec has imported.

    _registry.pop("s3", None)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(hl.HooklineError, match=rf"pip install 'hookline\[{extra}\]'"):
        open_storage("s3://bucket/acts")
