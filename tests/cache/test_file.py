"""The file format: values come back bit for bit, and every problem with a file or a disk is reported."""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from hookline._kernel import read_file, write_file
from hookline.errors import StoreError
from tests.errors.wording import says
from tests.support import states
from tests.support.cache_files import DTYPES, FORMAT, NAMES, leftovers, same

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


def round_trip(path: Path, value: Any) -> Any:
    write_file(path, {"h.3": [value]}, overwrite=True)
    return read_file(path)["h.3"][0]


def bits(dtype: torch.dtype, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
    """Return a tensor of arbitrary bits, including NaNs of every kind."""
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    data = (data * size)[:size] if data else bytes(size)
    memory = bytearray(byte & 1 for byte in data) if dtype is torch.bool else bytearray(data)
    return torch.frombuffer(memory, dtype=dtype).clone().view(shape)


def test_nested_values_of_several_calls_come_back(path: Path) -> None:
    hidden = torch.randn(2, 3)
    value = (
        hidden,
        [None, True, 1, -0.5, "é\n", 2 - 3j],
        {"mask": torch.ones(2, dtype=torch.bool), 0: (), None: {}, True: []},
    )
    entries = {"h.3": [value, hidden + 1], "": [None], 'h.3:inputs["x"][:, -1]': [], "a\ud800/../b": [[[]]]}
    write_file(path, entries)
    back = read_file(path)
    assert list(back) == list(entries)
    assert same(back, entries)


def test_no_site_at_all_is_a_file_too(path: Path) -> None:
    write_file(path, {})
    assert read_file(path) == {}


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
    write_file(path, {"h": values})
    assert same(read_file(path)["h"], values)


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


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(entries=st.dictionaries(st.text(max_size=5), st.lists(values, max_size=3), max_size=4))
def test_any_nested_value_comes_back_bit_for_bit(path: Path, entries: dict[str, list[Any]]) -> None:
    write_file(path, entries, overwrite=True)
    assert same(read_file(path), entries)


def test_a_tensor_that_appears_twice_is_written_once_and_shared_again(path: Path) -> None:
    value = torch.randn(1000)
    other = value[:]  # A different object with the same memory.
    write_file(path, {"a": [value, [other]], "b": [value.clone()], "c": [value.view(10, 100)]})
    back = read_file(path)
    assert path.stat().st_size < 3 * 4000 + 1000
    back["a"][0][0] = 7.0
    assert back["a"][1][0][0] == 7.0
    assert back["b"][0][0] == value[0]
    assert back["c"][0][0, 0] == value[0]


@pytest.mark.parametrize("share", [lambda part: part, torch._lazy_clone], ids=["view", "copy on write"])
def test_parts_of_one_memory_that_look_alike_are_told_apart(path: Path, share: Any) -> None:
    halves = [share(half) for half in torch.arange(8.0).chunk(2)]
    write_file(path, {"a": halves})
    assert [half.tolist() for half in read_file(path)["a"]] == [half.tolist() for half in halves]


def test_what_is_shared_copy_on_write_is_written_once_and_read_as_values_of_their_own(path: Path) -> None:
    value = torch.randn(1000)
    first, second = torch._lazy_clone(value), torch._lazy_clone(value)
    write_file(path, {"h.3": [first], "h.4:input": [second, second]})
    assert path.stat().st_size < 4000 + 1000
    assert torch._C._is_cow_tensor(first), "writing made a copy that the cache now holds"
    back = read_file(path)
    back["h.3"][0][0] = 7.0
    assert same(back["h.4:input"][0], value)
    back["h.4:input"][0][1] = 8.0
    assert back["h.4:input"][1][1] == 8.0
    assert back["h.3"][0][1] == value[1]


def test_views_that_differ_only_in_a_sign_are_not_mistaken_for_each_other(path: Path) -> None:
    value = torch.randn(4, dtype=torch.complex64)
    entries = {"h": [value, value.conj(), value.imag, value.conj().imag]}
    write_file(path, entries)
    assert same(read_file(path), entries)


def test_a_value_made_while_it_is_read_is_not_mistaken_for_an_older_one(path: Path) -> None:
    class Fresh(collections.UserDict[str, Any]):
        def __getitem__(self, site: str) -> Any:
            return [torch.full((100,), float(site))]  # Freed at once, so the next one may get the same address.

    write_file(path, Fresh({str(i): None for i in range(20)}))
    assert all(calls[0][0] == float(site) for site, calls in read_file(path).items())


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
    write_file(path, entries)
    first = path.read_bytes()
    write_file(path, read_file(path), overwrite=True)
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
    write_file(path, {"h": [1]})
    value = unwritable()[name]
    with pytest.raises(StoreError, match=says("acts safetensors cache map cache", "h.7:input")) as caught:
        write_file(path, {"h.6": [torch.ones(2)], "h.7:input": [torch.ones(2), (1, {"x": [value]})]}, overwrite=True)
    assert name in str(caught.value)
    assert read_file(path) == {"h": [1]}
    assert not leftovers(path)


def test_a_tensor_inside_vmap_is_refused(path: Path) -> None:
    def save(x: torch.Tensor) -> torch.Tensor:
        write_file(path, {"h": [x]})
        return x

    with pytest.raises(StoreError, match=says("acts safetensors cache map cache", "h")):
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
    write_file(path, entries)
    flat = entries["h"][0]
    found = safetensors.torch.load_file(path)
    assert sorted(found, key=int) == [str(i) for i in range(len(flat))]
    for name, tensor in found.items():
        expected = flat[int(name)]
        assert states.bits(tensor) == states.bits(expected)
        assert NAMES[tensor.dtype] == NAMES[expected.dtype]
    with safetensors.safe_open(path, framework="pt") as file:
        manifest = json.loads(file.metadata()["hookline"])
    assert manifest["format"] == FORMAT
    assert manifest["sites"][0][0] == "h"


def test_every_tensor_is_aligned_to_its_elements(path: Path) -> None:
    write_file(path, {"h": [bits(dtype, (3,), b"x") for dtype in DTYPES]})
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    sizes = {name: dtype.itemsize for dtype, name in NAMES.items() if not dtype.is_complex}
    del header["__metadata__"]
    assert length % 8 == 0
    assert all(entry["data_offsets"][0] % sizes[entry["dtype"]] == 0 for entry in header.values())


def test_what_was_read_needs_the_file_no_more(path: Path) -> None:
    value = torch.randn(100_000)
    write_file(path, {"h": [value]})
    back = read_file(path)["h"][0]
    with open("/proc/self/maps") as maps:
        assert str(path) not in maps.read()
    path.write_bytes(b"")
    assert torch.equal(back, value)
    back.resize_(200_000)  # Works only if torch owns the memory.


def test_reading_and_writing_do_not_depend_on_the_mode_around_them(path: Path) -> None:
    with torch.device("meta"), torch.inference_mode():
        write_file(path, {"h": [torch.arange(3.0, device="cpu")]})
        value = read_file(path)["h"][0]
    assert value.device.type == "cpu"
    assert not value.is_inference()
    value.requires_grad_().pow(2).sum().backward()
    assert value.grad is not None


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
    write_file(path, {"h": entries})
    back = read_file(path)["h"]
    assert all(tensor.device.type == "cpu" for tensor in back)
    assert all(
        torch.equal(new.view(torch.uint8), old.resolve_conj().resolve_neg().contiguous().cpu().view(torch.uint8))
        for new, old in zip(back, entries, strict=True)
    )
    assert torch._C._is_cow_tensor(shared)
