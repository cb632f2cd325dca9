"""The file format: what goes in comes out bit for bit, and whatever is wrong with a file or a disk is said."""

from __future__ import annotations

import collections
import dataclasses
import enum
import io
import json
import math
import os
import pickle
import re
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from hookline import _files
from hookline._cache import file as files
from hookline.errors import StoreError

DTYPES = [dtype for dtype in _files.DTYPES.values() if _files.stored_dtype(dtype)]
TEMPORARY = files._TEMPORARY

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")


class Pair(NamedTuple):
    values: Any
    indices: Any


@dataclasses.dataclass
class Step:
    hidden: Any
    note: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Hidden:
    _state: Any
    count: int


class Row(tuple[Any, ...]):
    pass


class Color(enum.Enum):
    RED = 1


class Mine(torch.Tensor):
    pass


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "acts.safetensors"


def round_trip(path: Path, value: Any) -> Any:
    files.write_file(path, {"h.3": [value]}, overwrite=True)
    return files.read_file(path)["h.3"][0]


def raw(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    return bytes(plain.reshape(-1).view(torch.uint8).tolist()) if plain.numel() else b""


def same(left: Any, right: Any) -> bool:
    """Tell whether two values have the same types and the same bits."""
    if isinstance(left, torch.Tensor):
        return (left.dtype, left.shape, raw(left)) == (right.dtype, right.shape, raw(right))
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, complex):
        return same([left.real, left.imag], [right.real, right.imag])
    if isinstance(left, dict):
        return same(list(left.items()), list(right.items()))
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def bits(dtype: torch.dtype, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
    """Make a tensor of any bits at all, NaNs of every kind among them."""
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    data = (data * size)[:size] if data else bytes(size)
    memory = bytearray(byte & 1 for byte in data) if dtype is torch.bool else bytearray(data)
    return torch.frombuffer(memory, dtype=dtype).clone().view(shape)


def leftovers(path: Path) -> list[str]:
    return [name for name in os.listdir(path.parent) if name.endswith(TEMPORARY)]


def child(code: str, *arguments: object) -> list[str]:
    """Return the command that runs `code` in a process of its own, with `path` its first argument."""
    start = "import os, sys, torch\nfrom hookline._cache import file as files\nfrom hookline.errors import StoreError\n"
    return [sys.executable, "-c", start + "path = sys.argv[1]\n" + textwrap.dedent(code), *map(str, arguments)]


def run(code: str, *arguments: object) -> str:
    done = subprocess.run(child(code, *arguments), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def forge(path: Path, tensors: list[Any], sites: list[Any], data: bytes = b"", **more: Any) -> None:
    """Write a file of a hostile manifest whose checksums are all right."""
    header = files._header({"format": files._FORMAT, "tensors": tensors, "sites": sites, **more})
    path.write_bytes(header + data)


def test_nested_values_of_several_calls_come_back(path: Path) -> None:
    hidden = torch.randn(2, 3)
    value = (
        hidden,
        [None, True, 1, -0.5, "é\n", 2 - 3j],
        {"mask": torch.ones(2, dtype=torch.bool), 0: (), None: {}, True: []},
    )
    entries = {"h.3": [value, hidden + 1], "": [None], 'h.3:inputs["x"][:, -1]': [], "a\ud800/../b": [[[]]]}
    files.write_file(path, entries)
    back = files.read_file(path)
    assert list(back) == list(entries)
    assert same(back, entries)


def test_no_site_at_all_is_a_file_too(path: Path) -> None:
    files.write_file(path, {})
    assert files.read_file(path) == {}


@pytest.mark.parametrize(
    "value",
    [
        2**63, -(2**63), 2**100_000, -(2**70), math.inf, -math.inf, math.nan, -0.0, 5e-324, complex(-0.0, math.nan),
        "", "\x00",
        torch.float8_e5m2, torch.device("cuda:3"), torch.device("meta"), torch.Size([]), torch.Size([2, 0]),
        collections.OrderedDict(b=1, a=2), {1: "int", "1": "str"}, {False: 0, "False": 1},
        struct.unpack("<d", bytes.fromhex("010000000000f4ff"))[0],
    ],
    ids=lambda value: repr(value)[:20] if not isinstance(value, int) else value.bit_length(),
)  # fmt: skip
def test_a_scalar_keeps_its_type_and_bits(path: Path, value: Any) -> None:
    assert same(round_trip(path, value), value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_of_every_dtype_and_shape_comes_back(path: Path, dtype: torch.dtype) -> None:
    data = bytes((7 * i + i // 255) % 256 for i in range(1, 1000))
    shapes = [(), (0,), (1,), (3, 5), (0, 4), (2, 1, 3, 2)]
    values = [bits(dtype, shape, data) for shape in shapes]
    files.write_file(path, {"h": values})
    assert same(files.read_file(path)["h"], values)


def test_the_dtypes_are_the_ones_torch_can_compute_with() -> None:
    assert len(DTYPES) >= 19
    assert {torch.complex128, torch.uint16, torch.float8_e4m3fnuz, torch.bfloat16, torch.bool} <= set(DTYPES)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[1:, 1:], lambda x: x.expand(3, 6, 4),
        lambda x: x[0, 0].expand(2, 5), lambda x: x.conj(), lambda x: x.conj().t()[1:], lambda x: x.conj().imag,
        lambda x: x.imag[::2], lambda x: x.real, lambda x: torch._neg_view(x), lambda x: x.flip(0), lambda x: x[:0],
        lambda x: x.as_strided((3, 3), (1, 2)),
        lambda x: nn.Parameter(x.clone()), lambda x: x.clone().requires_grad_() * 2, torch._lazy_clone,
        lambda x: torch._lazy_clone(x).conj(), lambda x: x[None, None].to(memory_format=torch.channels_last),
    ],
)  # fmt: skip
def test_any_view_comes_back_as_the_plain_values_it_shows(path: Path, view: Any) -> None:
    value = view(torch.randn(6, 4, dtype=torch.complex64))
    back = round_trip(path, value)
    assert same(back, value.detach())
    assert type(back) is torch.Tensor
    assert back.is_contiguous()
    assert not back.requires_grad
    assert not back.is_conj()
    assert not back.is_neg()


@pytest.mark.parametrize("shape", [(3, 1_500_001), (1, 1, 5_000_000), (5_000_003,), (2_000_001, 3), (2, 2, 1_200_000)])
def test_a_tensor_of_many_pieces_comes_back(path: Path, shape: tuple[int, ...]) -> None:
    value = torch.arange(math.prod(shape), dtype=torch.int32).view(shape)
    back = round_trip(path, [value, value.transpose(0, -1), value.to(torch.int8)])
    assert torch.equal(back[0], value)
    assert torch.equal(back[1], value.transpose(0, -1))
    assert torch.equal(back[2], value.to(torch.int8))


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), st.text(st.characters(codec=None)),
    st.builds(bits, st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3).map(tuple), st.binary(max_size=9)),
    st.sampled_from([torch.float32, torch.device("cuda", 1), torch.Size([2, 3])]),
)  # fmt: skip
keys = st.one_of(st.none(), st.text(max_size=3), st.integers(2))
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(collections.OrderedDict),
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(entries=st.dictionaries(st.text(max_size=5), st.lists(values, max_size=3), max_size=4))
def test_any_nested_value_comes_back_bit_for_bit(path: Path, entries: dict[str, list[Any]]) -> None:
    files.write_file(path, entries, overwrite=True)
    assert same(files.read_file(path), entries)


def test_a_tensor_that_appears_twice_is_written_once_and_shared_again(path: Path) -> None:
    value = torch.randn(1000)
    other = value[:]  # Another object, the same memory.
    files.write_file(path, {"a": [value, [other]], "b": [value.clone()], "c": [value.view(10, 100)]})
    back = files.read_file(path)
    assert path.stat().st_size < 3 * 4000 + 1000
    back["a"][0][0] = 7.0
    assert back["a"][1][0][0] == 7.0
    assert back["b"][0][0] == value[0]
    assert back["c"][0][0, 0] == value[0]


@pytest.mark.parametrize("share", [lambda part: part, torch._lazy_clone], ids=["view", "copy on write"])
def test_parts_of_one_memory_that_look_alike_are_told_apart(path: Path, share: Any) -> None:
    halves = [share(half) for half in torch.arange(8.0).chunk(2)]
    files.write_file(path, {"a": halves})
    assert [half.tolist() for half in files.read_file(path)["a"]] == [half.tolist() for half in halves]


def test_what_is_shared_copy_on_write_is_written_once_and_read_as_values_of_their_own(path: Path) -> None:
    value = torch.randn(1000)
    first, second = torch._lazy_clone(value), torch._lazy_clone(value)
    files.write_file(path, {"h.3": [first], "h.4:input": [second, second]})
    assert path.stat().st_size < 4000 + 1000
    assert torch._C._is_cow_tensor(first), "writing made a copy that the cache now holds"
    back = files.read_file(path)
    back["h.3"][0][0] = 7.0
    assert same(back["h.4:input"][0], value)
    back["h.4:input"][0][1] = 8.0
    assert back["h.4:input"][1][1] == 8.0
    assert back["h.3"][0][1] == value[1]


def test_views_that_differ_only_in_a_sign_are_not_mistaken_for_each_other(path: Path) -> None:
    value = torch.randn(4, dtype=torch.complex64)
    entries = {"h": [value, value.conj(), value.imag, value.conj().imag]}
    files.write_file(path, entries)
    assert same(files.read_file(path), entries)


def test_a_value_made_while_it_is_read_is_not_mistaken_for_an_older_one(path: Path) -> None:
    class Fresh(collections.UserDict[str, Any]):
        def __getitem__(self, site: str) -> Any:
            return [torch.full((100,), float(site))]  # Freed at once, so that the next one may take its address.

    files.write_file(path, Fresh({str(i): None for i in range(20)}))
    assert all(calls[0][0] == float(site) for site, calls in files.read_file(path).items())


def test_records_come_back_as_namedtuples_with_their_name_and_fields(path: Path) -> None:
    topk = torch.randn(3, 4).topk(2)
    pair, step, found = round_trip(path, (Pair(torch.ones(2), None), Step(Pair(1, 2), "x"), topk))
    assert type(pair).__name__ == "Pair"
    assert pair.indices is None
    assert torch.equal(pair[0], torch.ones(2))
    assert (type(step).__name__, step.hidden.values, step.note, step[1]) == ("Step", 1, "x", "x")
    assert type(found).__name__ == "topk"
    assert same((found.values, found.indices), (topk.values, topk.indices))


def test_records_of_one_type_come_back_as_one_type_from_every_file(path: Path) -> None:
    first, second = round_trip(path, [Pair(1, 2), Pair(3, 4)])
    assert type(first) is type(second) is type(round_trip(path, Pair(5, 6)))


def test_a_record_whose_fields_a_namedtuple_refuses_comes_back_as_a_dict(path: Path) -> None:
    assert round_trip(path, Hidden("x", 2)) == {"_state": "x", "count": 2}
    wide = dataclasses.make_dataclass("Wide", [f"x{i}" for i in range(300)])
    assert round_trip(path, wide(*range(300))) == {f"x{i}": i for i in range(300)}


def test_a_field_that_was_never_set_is_not_there_afterwards_either(path: Path) -> None:
    kind = dataclasses.make_dataclass("Later", ["a", ("b", int, dataclasses.field(init=False))])
    back = round_trip(path, kind(1))
    assert back.a == 1
    assert not hasattr(back, "b")


def test_a_model_output_answers_to_names_and_numbers_as_before_also_when_saved_again(path: Path) -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    value = outputs.CausalLMOutput(logits=torch.randn(2, 5), hidden_states=(torch.ones(1), torch.zeros(1)))
    for _ in range(2):
        back = round_trip(path, value)
        assert type(back).__name__ == "CausalLMOutput"
        assert torch.equal(back[0], value.logits)
        assert torch.equal(back.logits, value.logits)
        assert torch.equal(back.hidden_states[1], torch.zeros(1))
        assert back.loss is None
        assert len(back) == 2
        value = back


def test_a_file_saved_over_the_one_it_was_loaded_from_holds_the_same(path: Path) -> None:
    entries = {"h": [torch.randn(100, 100), Pair(torch.zeros(3), "x")]}
    files.write_file(path, entries)
    first = path.read_bytes()
    files.write_file(path, files.read_file(path), overwrite=True)
    assert path.read_bytes() == first


def unwritable() -> dict[str, Any]:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(3)
    loop: list[Any] = []
    loop.append(loop)
    return {
        "builtins.object": object(),
        "Color": Color.RED,
        "test_file.Row": Row([1]),
        "builtins.set": {1},
        "builtins.bytes": b"x",
        "builtins.type": Step,
        "numpy.float64": torch.ones(1, dtype=torch.float64).numpy()[0],
        "numpy.ndarray": torch.ones(1).numpy(),
        "defaultdict": collections.defaultdict(list),
        "key of type tuple": {(1, 2): 3},
        "key of type float": {1.5: 3},
        "Categorical": torch.distributions.Categorical(torch.ones(2)),
        "torch.sparse_coo": torch.eye(3).to_sparse(),
        "torch.sparse_csr": torch.eye(3).to_sparse_csr(),
        "_mkldnn": torch.ones(3).to_mkldnn(),
        "NestedTensor": jagged,
        "a nested tensor": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "torch.qint8": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "on meta": torch.empty(3, device="meta"),
        "FakeTensor": fake,
        "Mine": torch.ones(2).as_subclass(Mine),
        "UninitializedParameter": nn.UninitializedParameter(),
        "torch.bits8": torch.ones(2, dtype=torch.uint8).view(torch.bits8),
        "levels deep": loop,
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", unwritable())
def test_what_cannot_be_written_exactly_is_refused_by_site_and_type(path: Path, name: str) -> None:
    files.write_file(path, {"h": [1]})
    value = unwritable()[name]
    with pytest.raises(StoreError, match=r"acts.safetensors.*'h.7:input'.*cache\.map.*cache\.select") as caught:
        files.write_file(
            path, {"h.6": [torch.ones(2)], "h.7:input": [torch.ones(2), (1, {"x": [value]})]}, overwrite=True
        )
    assert name in str(caught.value)
    assert files.read_file(path) == {"h": [1]}
    assert not leftovers(path)


def test_a_tensor_inside_vmap_is_refused(path: Path) -> None:
    def save(x: torch.Tensor) -> torch.Tensor:
        files.write_file(path, {"h": [x]})
        return x

    with pytest.raises(StoreError, match=r"'h'.*torch\.func"):
        torch.vmap(save)(torch.ones(2, 3))
    assert not path.exists()


def test_a_hundred_levels_are_kept(path: Path) -> None:
    value: Any = "deep"
    for _ in range(100):
        value = [value]
    assert round_trip(path, value) == value


def test_any_safetensors_reader_opens_the_file(path: Path) -> None:
    data = bytes(range(200))
    entries = {"h": [[bits(dtype, shape, data) for dtype in DTYPES for shape in [(3,), (), (0, 2)]]]}
    files.write_file(path, entries)
    flat = entries["h"][0]
    found = safetensors.torch.load_file(path)
    assert sorted(found, key=int) == [str(i) for i in range(len(flat))]
    for name, tensor in found.items():
        expected = flat[int(name)]
        assert raw(tensor) == raw(expected)
        assert tensor.dtype == expected.dtype or expected.dtype not in _files.NAMES
    with safetensors.safe_open(path, framework="pt") as file:
        manifest = json.loads(file.metadata()["hookline"])
    assert manifest["format"] == ["hookline cache", 1]
    assert manifest["sites"][0][0] == "h"


def test_every_tensor_is_aligned_to_its_elements(path: Path) -> None:
    files.write_file(path, {"h": [bits(dtype, (3,), b"x") for dtype in DTYPES]})
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    sizes = {name: dtype.itemsize for dtype, name in _files.NAMES.items()}
    del header["__metadata__"]
    assert length % 8 == 0
    assert all(entry["data_offsets"][0] % sizes[entry["dtype"]] == 0 for entry in header.values())


@pytest.fixture
def small(path: Path) -> bytes:
    files.write_file(
        path, {"h.3": [(torch.arange(5.0), None)], "h.4:input": [torch.zeros(2, 2, dtype=torch.bool), 1.5]}
    )
    return path.read_bytes()


def test_a_file_cut_short_anywhere_is_refused(path: Path, small: bytes) -> None:
    for length in range(len(small)):
        path.write_bytes(small[:length])
        with pytest.raises(StoreError, match=r"acts\.safetensors"):
            files.read_file(path)


@pytest.mark.parametrize("mask", [0x01, 0x02, 0x20, 0x80, 0xFF])
def test_a_file_with_any_byte_changed_is_refused(path: Path, small: bytes, mask: int) -> None:
    for position in range(len(small)):
        path.write_bytes(small[:position] + bytes([small[position] ^ mask]) + small[position + 1 :])
        with pytest.raises(StoreError, match=r"acts\.safetensors"):
            files.read_file(path)


def test_a_file_with_bytes_added_or_swapped_is_refused(path: Path, small: bytes) -> None:
    for changed in (small + b"\0", b"\0" + small, small + small, small[:-4] + small[-2:] + small[-4:-2] + b"\1"):
        path.write_bytes(changed)
        with pytest.raises(StoreError, match=r"acts\.safetensors"):
            files.read_file(path)


def test_another_programs_safetensors_file_says_how_to_read_it(path: Path) -> None:
    for metadata in (None, {"format": "pt"}):
        safetensors.torch.save_file({"x": torch.ones(2)}, path, metadata=metadata)
        with pytest.raises(StoreError, match=r"not from hookline.*safetensors\.torch\.load_file"):
            files.read_file(path)


def test_a_file_rewritten_by_another_program_is_refused(path: Path) -> None:
    files.write_file(path, {"h": [torch.ones(2), torch.zeros(3)]})
    with safetensors.safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) + 1 for name in file.keys()}  # noqa: SIM118
    safetensors.torch.save_file(tensors, path, metadata=metadata)
    with pytest.raises(StoreError, match="damaged"):
        files.read_file(path)


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.target),))


def test_a_pickle_is_never_executed(path: Path, tmp_path: Path) -> None:
    bomb = Bomb(tmp_path / "executed")
    archive = io.BytesIO()
    torch.save(bomb, archive)
    legacy = io.BytesIO()
    torch.save(bomb, legacy, _use_new_zipfile_serialization=False)
    pickles = [pickle.dumps(bomb, protocol) for protocol in range(6)]
    for content in (archive.getvalue(), legacy.getvalue(), *pickles):
        path.write_bytes(content)
        with pytest.raises(StoreError, match=r"no pickle is ever opened.*torch\.load\(path, weights_only=True\)"):
            files.read_file(path)
    assert not bomb.target.exists()
    pickle.loads(pickles[-1])
    assert bomb.target.exists(), "the bomb would have gone off"


def test_what_is_no_file_is_said(path: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"acts\.safetensors.*No such file"):
        files.read_file(path)
    with pytest.raises(StoreError, match="not a regular file"):
        files.read_file(tmp_path)
    with pytest.raises(StoreError, match="not a regular file"):
        files.read_file("/dev/zero")
    os.mkfifo(path)
    with pytest.raises(StoreError, match="not a regular file"):
        files.read_file(path)


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"\xff" * 100, b"{}", b"\x02" + b"\0" * 7 + b"{}", b"x" * 5000])
def test_content_of_another_kind_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"acts\.safetensors"):
        files.read_file(path)


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b'{"a":' * 100_000, b"1" * 100_000, b'["hookline"]', b'"hookline"', b"null"]
)
def test_an_absurd_header_is_refused(path: Path, text: bytes) -> None:
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(StoreError, match=r"acts\.safetensors"):
        files.read_file(path)


NOTE = [f"{zlib.crc32(bytes(4)):08x}", "torch.float32", [1]]
TENSOR = ["tensor", 0, 0]


@pytest.mark.parametrize(
    ("tensors", "sites", "data"),
    [
        ([NOTE], [], bytes(4)),  # A tensor of no site.
        ([], [["h", [TENSOR]]], b""),  # A tensor that is not there.
        ([NOTE], [["h", [["tensor", -1, 0]]]], bytes(4)),
        ([NOTE], [["h", [["tensor", "0", 0]]]], bytes(4)),
        ([NOTE], [["h", [TENSOR, ["tensor", 0]]]], bytes(4)),
        ([NOTE], [["h", [TENSOR]], ["h", []]], bytes(4)),  # A site twice.
        ([NOTE], [["h", [TENSOR]]], bytes(8)),
        ([[*NOTE[:2], [1 << 40]]], [["h", [TENSOR]]], bytes(4)),
        ([[*NOTE[:2], [-1]]], [["h", [TENSOR]]], bytes(4)),
        ([[*NOTE[:2], [True]]], [["h", [TENSOR]]], bytes(4)),
        ([["00000000", "torch.float32", [1 << 62, 1 << 62, 0]]], [["h", [TENSOR]]], b""),
        ([[*NOTE[:2], [1] * 1000]], [["h", [TENSOR]]], bytes(4)),
        ([[NOTE[0], "torch.qint32", [1]]], [["h", [TENSOR]]], bytes(4)),
        ([[NOTE[0], "os.system", [1]]], [["h", [TENSOR]]], bytes(4)),
        ([], [["h", [["eval", "1"]]]], b""),
        ([], [["h", [["record", "x", []]]]], b""),
        ([], [["h", [["dict", 1]]]], b""),
        ([], [["h", [["dict", 1, 2, 1, 3]]]], b""),
        ([], [["h", [["dict", ["list"], 2]]]], b""),
        ([], [["h", [["device", "nowhere"]]]], b""),
        ([], [["h", [["float", "00"]]]], b""),
        ([], [["h", [1.5]]], b""),
        ([], [["h", [{"tuple": 1}]]], b""),
        ([], [["h", [[]]]], b""),
        ([], [["h", 5]], b""),
        ([], 5, b""),
        (5, [], b""),
        ([], [["h", [json.loads("[" * 500 + "]" * 500)]]], b""),
    ],
)  # fmt: skip
def test_a_hostile_manifest_is_refused(path: Path, tensors: Any, sites: Any, data: bytes) -> None:
    try:
        forge(path, tensors, sites, data)
    except (ValueError, TypeError, KeyError):  # Not even the forger can lay it out: put the manifest there as it is.
        manifest = json.dumps({"format": files._FORMAT, "tensors": tensors, "sites": sites})
        text = json.dumps(
            {"__metadata__": {"hookline": manifest, "checksum": f"{zlib.crc32(manifest.encode()):08x}"}},
            separators=(",", ":"),
        )
        path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + data)
    with pytest.raises(StoreError, match=r"acts\.safetensors.*(damaged|too long)"):
        files.read_file(path)


def test_the_forger_of_these_tests_can_forge(path: Path) -> None:
    forge(path, [NOTE], [["h", [TENSOR]]], bytes(4))
    assert same(files.read_file(path), {"h": [torch.zeros(1)]})


def test_names_in_a_hostile_record_reach_nothing(path: Path) -> None:
    names = ["__class__", "_fields", "x y", "class", "x=print(1)", "ﬁ", "fi", "", "a"]
    forge(path, [], [["h", [["record", "R", ["tuple", "__new__"], "a", 1], ["record", "R;", ["tuple"], "b", 2]]]])
    assert files.read_file(path) == {"h": [{"a": 1}, {"b": 2}]}
    parts = [part for name in names for part in (name, 1)]
    forge(path, [], [["h", [["record", "R", ["tuple"], *parts], ["record", "R", ["tuple"], "ﬁ", 1, "fi", 2]]]])
    assert files.read_file(path) == {"h": [dict.fromkeys(names, 1), {"ﬁ": 1, "fi": 2}]}


def test_a_header_with_overlapping_tensors_is_refused(path: Path) -> None:
    files.write_file(path, {"h": [torch.zeros(2), torch.ones(2)]})
    content = path.read_bytes()
    changed = content.replace(b'"data_offsets":[8,16]', b'"data_offsets":[0,8] ')
    assert changed != content
    path.write_bytes(changed)
    with pytest.raises(StoreError, match="damaged"):
        files.read_file(path)


def test_a_file_of_a_later_version_says_to_update(path: Path) -> None:
    header = files._header({"format": ["hookline cache", 2], "tensors": [], "sites": []})
    path.write_bytes(header)
    with pytest.raises(StoreError, match=r"\['hookline cache', 2\].*update hookline"):
        files.read_file(path)


def test_a_changed_version_is_damage_and_no_later_one(path: Path) -> None:
    files.write_file(path, {"h": [torch.zeros(2)]})
    content = path.read_bytes()
    changed = content.replace(b'cache\\",1]', b'cache\\",3]')
    assert changed != content
    path.write_bytes(changed)
    with pytest.raises(StoreError, match="is damaged: its header does not fit its checksum; save it again"):
        files.read_file(path)


def test_a_huge_claim_is_refused_before_anything_is_allocated(path: Path) -> None:
    forge(path, [["00000000", "torch.float32", [1 << 40]]], [["h", [TENSOR]]])
    started = time.perf_counter()
    with pytest.raises(StoreError, match="cut short"):
        files.read_file(path)
    path.write_bytes((1 << 40).to_bytes(8, "little") + b"{" * 100)
    with pytest.raises(StoreError, match="cut short"):
        files.read_file(path)
    assert time.perf_counter() - started < 5


def test_a_cache_of_a_hundred_thousand_sites_is_read_and_one_of_millions_of_values_is_refused(path: Path) -> None:
    many = [[f"transformer.h.{number % 96}.attn.part_{number}", [number]] for number in range(100_000)]
    tensors = [["00000000", "torch.float32", [0]] for _ in range(100_000)]
    nodes = [[site, [["tensor", number, 0]]] for number, (site, _) in enumerate(many)]
    forge(path, tensors, nodes)
    assert path.stat().st_size > 10_000_000
    with open(path, "rb") as file:
        assert len(files._manifest(file, path.stat().st_size)[0]["sites"]) == 100_000
    with pytest.raises(StoreError, match="too many values for one file"):
        files.write_file(path, {"h": [[0] * 4_000_000]}, overwrite=True)


def test_an_existing_file_is_replaced_only_when_asked(path: Path, tmp_path: Path) -> None:
    files.write_file(path, {"h": [1]})
    with pytest.raises(StoreError, match=r"acts\.safetensors.*exists.*overwrite=True"):
        files.write_file(path, {"h": [2]})
    assert files.read_file(path) == {"h": [1]}
    files.write_file(path, {"h": [2]}, overwrite=True)
    assert files.read_file(path) == {"h": [2]}
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_or_pipe_is_never_replaced(path: Path, tmp_path: Path, overwrite: bool) -> None:
    os.mkfifo(path)  # It stands for /dev/null, which root could lose.
    for target in (tmp_path, path):
        with pytest.raises(StoreError, match="only files are replaced"):
            files.write_file(target, {"h": [2]}, overwrite=overwrite)
    assert path.is_fifo()


def test_a_link_is_followed_and_stays_a_link(path: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    real = tmp_path / "elsewhere" / "real.safetensors"
    path.symlink_to(real)
    for number in (1, 2):
        files.write_file(path, {"h": [number]}, overwrite=number == 2)
        assert path.is_symlink()
        assert files.read_file(real) == files.read_file(path) == {"h": [number]}


def test_a_plain_name_and_a_name_of_full_length_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("acts", "x" * 255, "é" * 127):
        files.write_file(name, {"h": [1]})
        assert files.read_file(name) == {"h": [1]}


def test_the_file_has_the_rights_of_any_new_file(path: Path) -> None:
    before = os.umask(0o027)
    try:
        files.write_file(path, {"h": [1]})
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_missing_folder_is_said_with_path_and_size(tmp_path: Path) -> None:
    with pytest.raises(
        StoreError, match=r"'.*/nowhere/acts' was not written \(4,\d\d\d bytes\): No such file.*folder exists"
    ):
        files.write_file(tmp_path / "nowhere" / "acts", {"h": [torch.zeros(1000)]})


def test_a_folder_without_the_right_to_write_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o500)
    if os.getuid() == 0:
        for place in (tmp_path, *tmp_path.parents[:2]):
            place.chmod(0o755)
    said = run(
        """
        if os.getuid() == 0:
            os.setuid(65534)
        try:
            files.write_file(path + "/acts", {"h": [1]})
        except StoreError as error:
            print(error)
        """,
        folder,
    )
    assert "Permission denied" in said
    assert "may be written to" in said


def limited(path: Path, value: str) -> str:
    """Save over a file in a process that may write 9 MB; return what it says, with the old file still there alone."""
    files.write_file(path, {"h": [1]})
    said = run(
        f"""
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (9_000_000, 9_000_000))
        try:
            files.write_file(path, {{"h": [{value}]}}, overwrite=True)
        except StoreError as error:
            print(error)
        """,
        path,
    )
    assert files.read_file(path) == {"h": [1]}
    assert os.listdir(path.parent) == [path.name]
    return said


def test_more_than_the_disk_has_room_for_is_refused_before_writing(path: Path) -> None:
    said = limited(path, "torch.zeros(1).expand(1 << 48)")
    assert re.search(r"\(1,125,899,9\d\d,\d\d\d,\d\d\d bytes\): No space left.*cache\.select", said)


def test_a_limit_on_file_sizes_leaves_the_old_file_and_nothing_else(path: Path) -> None:
    said = limited(path, "torch.zeros(5_000_000)")
    assert re.search(r"acts\.safetensors' was not written \(20,000,\d\d\d bytes\): File too large", said)


def test_a_disk_that_fills_up_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    """A disk with free bytes but no free inode: the check beforehand passes, the write does not."""
    code = """
        files.write_file(path + "/acts", {"h": [1]})
        import itertools
        try:
            for number in itertools.count():
                open(f"{path}/{number}", "w").close()
        except OSError:
            pass
        try:
            files.write_file(path + "/acts", {"h": [2]}, overwrite=True)
        except StoreError as error:
            print(error)
        assert files.read_file(path + "/acts") == {"h": [1]}
        assert not [name for name in os.listdir(path) if "hookline" in name]
        """
    command = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o nr_inodes=20 tmpfs "$0" && exec "$@"', str(tmp_path)]
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system in a namespace of its own")
    done = subprocess.run([*command, *child(code, tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "No space left on device" in done.stdout


def test_a_full_disk_in_the_midst_of_a_write_is_said_and_cleaned_up(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write_file(path, {"h": [1]})
    stream = files._stream

    def into_a_full_device(file: Any, *rest: Any) -> None:
        with open("/dev/full", "wb") as full:
            stream(full, *rest)

    monkeypatch.setattr(files, "_stream", into_a_full_device)
    with pytest.raises(StoreError, match=r"bytes\): No space left on device"):
        files.write_file(path, {"h": [torch.zeros(3_000_000)]}, overwrite=True)
    assert files.read_file(path) == {"h": [1]}
    assert os.listdir(path.parent) == [path.name]


def test_an_interrupt_in_the_midst_of_a_write_leaves_the_old_file_and_nothing_else(path: Path) -> None:
    files.write_file(path, {"h": [1]})

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for delay in (0.001, 0.005, 0.02):
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, delay)
                files.write_file(path, {"h": [torch.zeros(1).expand(1 << 26)]}, overwrite=True)
            assert files.read_file(path) == {"h": [1]}
            assert os.listdir(path.parent) == [path.name]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_leaves_the_old_file_or_the_new_one(path: Path) -> None:
    code = """
        print("ready", flush=True)
        for number in range(int(sys.argv[2]), 10**9):
            files.write_file(path, {"h": [number, torch.full((3_000_000,), number)]}, overwrite=True)
        """
    files.write_file(path, {"h": [0, torch.zeros(3)]})
    last, kills = 0, 0
    for delay in (0.0, 0.01, 0.03, 0.08, 0.13):
        writer = subprocess.Popen(child(code, path, last + 1), stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(delay)
        writer.kill()
        writer.wait()
        writer.stdout.close()
        kills += bool(leftovers(path))
        number, tensor = files.read_file(path)["h"]
        assert number >= last
        assert bool((tensor == number).all())
        last = number
    assert kills, "no writer was killed in the midst of a write"


def test_what_a_killed_writer_left_is_removed_by_a_later_save(path: Path) -> None:
    writer = subprocess.Popen(
        child("print('ready', flush=True); files.write_file(path, {'h': [torch.zeros(1).expand(1 << 30)]})", path),
        stdout=subprocess.PIPE,
    )
    assert writer.stdout is not None
    writer.stdout.readline()
    while not leftovers(path):
        time.sleep(0.001)
    writer.kill()
    writer.wait()
    writer.stdout.close()
    (stale,) = leftovers(path)
    files.write_file(path, {"h": [1]})
    assert leftovers(path) == [stale], "it is young: its writer could be alive"
    long_ago = time.time() - 2 * files._STALE
    os.utime(path.parent / stale, (long_ago, long_ago))
    (path.parent / "mine").touch()
    os.utime(path.parent / "mine", (long_ago, long_ago))
    files.write_file(path, {"h": [2]}, overwrite=True)
    assert sorted(os.listdir(path.parent)) == [path.name, "mine"]


def test_of_many_writers_at_once_exactly_one_wins(path: Path) -> None:
    barrier = threading.Barrier(8)
    won: list[int] = []
    lost: list[str] = []

    def save(number: int) -> None:
        value = torch.full((100_000,), number)
        barrier.wait()
        try:
            files.write_file(path, {"h": [value]})
        except StoreError as error:
            lost.append(str(error))
        else:
            won.append(number)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert all("exists" in message for message in lost)
    assert bool((files.read_file(path)["h"][0] == won[0]).all())
    assert os.listdir(path.parent) == [path.name]


def test_what_was_read_needs_the_file_no_more(path: Path) -> None:
    value = torch.randn(100_000)
    files.write_file(path, {"h": [value]})
    back = files.read_file(path)["h"][0]
    with open("/proc/self/maps") as maps:
        assert str(path) not in maps.read()
    path.write_bytes(b"")
    assert torch.equal(back, value)
    back.resize_(200_000)  # Its memory is torch's own.


def test_reading_and_writing_do_not_depend_on_the_mode_around_them(path: Path) -> None:
    with torch.device("meta"), torch.inference_mode():
        files.write_file(path, {"h": [torch.arange(3.0, device="cpu")]})
        value = files.read_file(path)["h"][0]
    assert value.device.type == "cpu"
    assert not value.is_inference()
    value.requires_grad_().pow(2).sum().backward()
    assert value.grad is not None


def test_writing_a_large_view_needs_little_memory(path: Path) -> None:
    said = run(
        """
        def peak():
            with open("/proc/self/status") as status:
                return int(next(line for line in status if line.startswith("VmHWM")).split()[1])

        value = torch.zeros(2048, 1).expand(2048, 40_000).t()  # 320 MB if it were copied.
        files.write_file(path, {"h": [torch.zeros(3_000_000)]})
        before = peak()
        files.write_file(path, {"h": [value]}, overwrite=True)
        print(peak() - before)
        """,
        path,
    )
    path.unlink()
    assert int(said) < 60_000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_values_on_a_gpu_come_back_on_the_cpu(path: Path) -> None:
    value = torch.randn(300, 9000, dtype=torch.complex64, device="cuda")
    shared = torch._lazy_clone(value)
    entries = [
        value,
        value.t(),
        value.conj(),
        value.conj().t(),
        value.conj().imag,
        value[:, ::2],
        shared,
        value.real.to(torch.float8_e4m3fn),
    ]
    files.write_file(path, {"h": entries})
    back = files.read_file(path)["h"]
    assert all(tensor.device.type == "cpu" for tensor in back)
    assert all(
        torch.equal(new.view(torch.uint8), old.resolve_conj().resolve_neg().contiguous().cpu().view(torch.uint8))
        for new, old in zip(back, entries, strict=True)
    )
    assert torch._C._is_cow_tensor(shared)
