"""hookline.compat.nice_hooks: the README's examples, the API name by name, and the original's bugs as gone."""

from __future__ import annotations

import copy
import functools
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.compat import nice_hooks
from hookline.compat.nice_hooks import ActivationCache, ModulePath, expand_module_path, run


class Model(nn.Module):
    """Children called as the README calls them; the ReLU writes in place, `unused` never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.mod1 = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True))
        self.mod2 = nn.Linear(5, 5)
        self.blocks = nn.ModuleList([nn.Linear(5, 5)])
        self.unused = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.blocks[0](self.mod2(self.mod1(x))) * scale  # type: ignore[no-any-return]


@pytest.fixture
def model() -> nn.Module:
    return Model()


@pytest.fixture
def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU())


X = torch.linspace(-1, 1, 8).reshape(2, 4)
RAN = ["mod1.0", "mod1.1", "mod1", "mod2", "blocks.0", ""]


def paths(model: nn.Module, path: Any) -> list[str]:
    return [str(found) for found, _ in expand_module_path(model, path)]


# The README.


def test_the_example_of_registering_prints_what_passes(model: nn.Module, capsys: Any) -> None:
    def my_hook(module: nn.Module, path: nice_hooks.ModulePath, args: Any, output: Any) -> None:
        print(output)  # noqa: T201

    # The README says "path.to.module", which torch allows no module to be called: "to" is a method of it.
    nice_hooks.register_forward_hook(model, "mod1.0", my_hook)  # What it returns is not kept, and yet it acts.
    gc.collect()
    expected = model.mod1[0](X)
    assert capsys.readouterr().out == f"{expected}\n"
    hl.clear(model)


def test_the_examples_of_run(model: nn.Module) -> None:
    assert run(model, X).equal(model(X))
    assert run(model, X, scale=2.0).equal(model(X, scale=2.0))
    seen: list[torch.Tensor] = []

    def hook1(module: nn.Module, path: ModulePath, args: Any, output: torch.Tensor) -> None:
        seen.append(output)

    result = nice_hooks.run(model, X, forward_hooks={"mod2": hook1})
    with nice_hooks.register_forward_hook(model, "mod2", hook1):
        same = model(X)
    assert result.equal(same)
    assert seen[0].equal(seen[1])
    assert len(seen) == 2


def test_the_examples_of_recording(model: nn.Module) -> None:
    result, cache = nice_hooks.run(model, X, return_activations=True)  # That `unused` did not run is not a surprise.
    assert result.equal(model(X))
    assert list(cache) == RAN
    assert type(cache) is ActivationCache
    result, cache = nice_hooks.run(model, X, return_activations=["mod1.*", "mod2"])
    assert list(cache) == ["mod1.0", "mod1.1", "mod2"]
    assert cache["mod2"].shape == (2, 5)


def test_the_examples_of_patching(model: nn.Module) -> None:
    def tail(value: torch.Tensor) -> torch.Tensor:
        return model.blocks[0](model.mod2(value))  # type: ignore[no-any-return]

    result = nice_hooks.run(model, X, with_activations={"mod1": torch.ones(5)})
    assert result.shape == (5,)
    assert result.equal(tail(torch.ones(5)))
    result = nice_hooks.run(model, X, with_activations={"mod1[:,3:5]": torch.ones(2)})
    patched = model.mod1(X).detach().clone()
    patched[:, 3:5] = 1
    assert result.equal(tail(patched))


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("mod1.0", ["mod1.0"]),
        ("mod1.*", ["mod1.0", "mod1.1"]),
        ("mod1.**", ["mod1.0", "mod1.1"]),
        ("mod1**", ["mod1", "mod1.0", "mod1.1"]),
        ("*", ["", "mod1", "mod2", "blocks", "unused"]),
        ("mod*", ["mod1", "mod2"]),
        ("**.0", ["mod1.0", "blocks.0"]),
        ("*.*", ["mod1.0", "mod1.1", "blocks.0"]),
        ("**", ["", "mod1", "mod1.0", "mod1.1", "mod2", "blocks", "blocks.0", "unused"]),
        (True, ["", "mod1", "mod1.0", "mod1.1", "mod2", "blocks", "blocks.0", "unused"]),
        (False, []),
        ("", [""]),
        ("mod?", []),
        ("nope", []),
        (["mod2", "mod*"], ["mod2", "mod1", "mod2"]),
        ("mod1.*[0,*]", ["mod1.0[0,*]", "mod1.1[0,*]"]),
    ],
)
def test_module_paths_mean_what_they_meant(model: nn.Module, path: Any, found: list[str]) -> None:
    assert paths(model, path) == found


def test_expanding_gives_the_modules_and_leaves_a_wildcard_of_an_index(model: nn.Module) -> None:
    [(path, module)] = expand_module_path(model, "mod2[*]")
    assert path == ModulePath("mod2", ("*",))
    assert module is model.mod2


def test_an_index_of_the_readme_hooks_each_part(chain: nn.Sequential) -> None:
    seen: dict[str, torch.Tensor] = {}

    def look(module: nn.Module, path: ModulePath, args: Any, output: torch.Tensor) -> None:
        seen[str(path)] = output

    output = chain[0](X)
    run(chain, X, forward_hooks={"0[:1]": look, "0[:,-3:]": look, "0[*]": look})
    assert list(seen) == ["0[:1]", "0[:,-3:]", "0[0]", "0[1]"]
    assert seen["0[:1]"].equal(output[:1])
    assert seen["0[:,-3:]"].equal(output[:, -3:])
    assert seen["0[1]"].equal(output[1])


# Paths.


@pytest.mark.parametrize(
    ("text", "index", "canonical"),
    [
        ("a", None, "a"),
        ("", None, ""),
        ("a[0]", (0,), "a[0]"),
        ("a[-1]", (-1,), "a[-1]"),
        ("a[0:5]", (slice(0, 5),), "a[0:5]"),
        ("a[:,-5:]", (slice(None), slice(-5, None)), "a[:,-5:]"),
        ("a[*]", ("*",), "a[*]"),
        ("a[*,0]", ("*", 0), "a[*,0]"),
        ("a[::2]", (slice(None, None, 2),), "a[::2]"),
        ("a[1:5:2]", (slice(1, 5, 2),), "a[1:5:2]"),
        ("a[ 0 , 1 : 2 ]", (0, slice(1, 2)), "a[0,1:2]"),
        ("a[..., None]", (..., None), "a[...,None]"),
    ],
)
def test_a_path_is_read_and_written(text: str, index: Any, canonical: str) -> None:
    path = ModulePath.parse(text)
    assert path == ModulePath(text.partition("[")[0], index)
    assert str(path) == canonical
    name, slices = path
    assert (name, slices) == (path.name, path.slice)
    assert ModulePath.parse(str(path)) == path


@pytest.mark.parametrize("part", ["", "-", "**", "x", "'k'", "1:2:3:4", "1.5"])
def test_what_is_no_index_is_shown(part: str) -> None:
    with pytest.raises(ValueError, match="is not an index") as error:
        ModulePath.parse(f"a[0,{part}]")
    assert repr(part) in str(error.value)


@pytest.mark.parametrize("text", ["a[0][1]", "a[0", "a]", "a[0]b"])
def test_what_is_no_path_is_shown(text: str) -> None:
    with pytest.raises(ValueError, match="is not a path") as error:
        ModulePath.parse(text)
    assert repr(text) in str(error.value)


def test_a_path_can_be_changed_and_not_hashed() -> None:
    path = ModulePath("a", 3)
    path.slice = None
    assert str(path) == "a"
    assert str(ModulePath("a", 3)) == "a[3]"
    with pytest.raises(TypeError, match="unhashable"):
        hash(path)


def test_everything_the_original_promised_is_there(model: nn.Module) -> None:
    names: dict[str, Any] = {}
    exec("from hookline.compat.nice_hooks import *", names)
    assert {*nice_hooks.__all__} <= {*names}
    exec("from hookline.compat.nice_hooks.nice_hooks import *", names)
    to_paths = names["to_paths"]
    assert [to_paths(True), to_paths(False), to_paths("a"), to_paths(("a", "b"))] == [["**"], [], ["a"], ["a", "b"]]
    assert to_paths(ModulePath("a", (0,))) == ["a[0]"]
    with pytest.raises(TypeError, match="a path is text, a list of texts, or True for every module, not NoneType"):
        to_paths(None)


def test_steps_are_no_longer_dropped(chain: nn.Sequential) -> None:
    _, cache = run(chain, X, return_activations=["0[:, ::2]", "0[..., None]", "0[-1, 1:5:2]"])
    whole = chain[0](X)
    assert cache["0[:,::2]"].equal(whole[:, ::2])
    assert cache["0[...,None]"].equal(whole[..., None])
    assert cache["0[-1,1:5:2]"].equal(whole[-1, 1:5:2])


# Forward hooks.


def test_a_forward_hook_gets_the_models_own_tensors(chain: nn.Sequential) -> None:
    seen: list[Any] = []

    def hook(module: nn.Module, path: ModulePath, args: tuple[Any, ...], output: torch.Tensor) -> None:
        output.retain_grad()
        seen.append((module, path, args, output))

    x = X.clone()
    with nice_hooks.register_forward_hook(chain, "0", hook):
        chain(x).sum().backward()
    [(module, path, args, output)] = seen
    assert module is chain[0]
    assert path == ModulePath("0", None)
    assert args[0] is x
    assert len(args) == 1
    assert output.grad is not None
    assert output.grad.equal((chain[0](X) > 0).float())


def test_what_a_forward_hook_writes_in_place_the_model_sees(chain: nn.Sequential) -> None:
    def clear(module: nn.Module, path: ModulePath, args: Any, output: torch.Tensor) -> None:
        output.zero_()

    with torch.no_grad():
        assert not run(chain, X, forward_hooks={"0": clear}).any()
        part = run(chain, X, forward_hooks={"0[:, 0]": clear})
    assert not part[:, 0].any()
    assert part[:, 1:].equal(chain(X)[:, 1:])


def test_what_a_forward_hook_returns_replaces_the_output_or_its_part(chain: nn.Sequential) -> None:
    assert run(chain, X, forward_hooks={"1": lambda module, path, args, output: "anything"}) == "anything"
    given = run(chain, X, forward_hooks={"0[:, *]": lambda module, path, args, output: float(path.slice[1])})
    assert given.equal(torch.arange(5.0).expand(2, 5))
    cast = run(chain, X, forward_hooks={"0[1]": lambda module, path, args, output: torch.ones(1, 5).double()})
    assert cast[1].equal(torch.ones(5))
    assert cast[0].equal(chain(X)[0])


def test_each_part_gets_the_value_of_its_path(chain: nn.Sequential) -> None:
    values = {"1[0]": 5.0, "1": torch.ones(2, 5), "0[:, 0]": 2.0, "1[:, 0]": 3.0, "1[:, 1]": 3.0, "1[1]": 4.0}
    result, cache = run(chain, X, with_activations=values, return_activations=["0"])
    assert cache["0"][:, 0].eq(2).all()
    assert result.tolist() == [[3.0, 3.0, 1.0, 1.0, 1.0], [4.0] * 5]


def test_later_paths_see_what_earlier_ones_returned(chain: nn.Sequential) -> None:
    def add(module: nn.Module, path: ModulePath, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 1

    result = run(chain, X, forward_hooks={("1", "1[0]", "1"): add})
    assert result.allclose(chain(X) + torch.tensor([[3.0], [2.0]]))


def test_several_wildcards_of_an_index_are_a_product(chain: nn.Sequential) -> None:
    seen: list[str] = []
    run(chain, X[:, :4], forward_hooks={"0[*,*]": lambda module, path, args, output: seen.append(str(path))})
    assert seen == [f"0[{row},{column}]" for row in range(2) for column in range(5)]


def test_an_index_that_is_not_there_names_the_place(chain: nn.Sequential) -> None:
    with pytest.raises(hl.SiteError, match=r"'0\[7\]': \[7\] is not a part of float32 \(2, 5\)"):
        run(chain, X, return_activations=["0[7]"])
    with pytest.raises(LookupError, match="3 indices for"):
        run(chain, X, return_activations=["0[*,*,*]"])


def test_an_index_of_a_tuple_is_its_item() -> None:
    gru = nn.GRU(4, 3)
    result, cache = run(gru, X, return_activations=["", "[1]"], with_activations={"[0]": 0.0})
    assert not result[0].any()
    assert type(cache[""]) is tuple
    assert cache["[1]"].equal(gru(X)[1])


def test_hooks_stay_until_they_are_removed(chain: nn.Sequential) -> None:
    calls: list[str] = []

    def note(module: nn.Module, path: ModulePath, args: Any, output: Any) -> None:
        calls.append(str(path))

    handles = nice_hooks.register_forward_hook(chain, "*", note)
    chain(X)
    assert calls == ["0", "1", ""]
    assert len(handles.handles) == 3
    handles.handles[0].remove()
    chain(X)
    assert calls[3:] == ["0", "1"]
    handles.remove()
    handles.remove()
    chain(X)
    assert len(calls) == 5
    assert "forward" not in vars(chain)
    with handles:  # Nothing is left to act.
        chain(X)
    assert len(calls) == 5


def test_a_block_removes_its_hooks_also_after_an_error(chain: nn.Sequential) -> None:
    with pytest.raises(ZeroDivisionError), nice_hooks.register_forward_hook(chain, "0", lambda *_: 1 / 0) as handles:
        assert type(handles) is nice_hooks.RemovableHandleCollection
        chain(X)
    assert "forward" not in vars(chain[0])
    with pytest.raises(ZeroDivisionError):
        run(chain, X, forward_hooks={"0": lambda *_: 1 / 0})
    assert "forward" not in vars(chain[0])


def test_a_collection_of_torchs_own_handles_works(chain: nn.Sequential) -> None:
    handle = chain.register_forward_hook(lambda module, args, output: torch.zeros(1))
    with nice_hooks.RemovableHandleCollection([handle]) as handles:
        assert handles.handles == [handle]
        assert chain(X).equal(torch.zeros(1))
    assert chain(X).shape == (2, 5)


def test_an_error_while_registering_leaves_nothing(chain: nn.Sequential) -> None:
    with pytest.raises(ValueError, match="is not an index"):
        nice_hooks.register_forward_hook(chain, ["0", "1[x]"], print)
    with pytest.raises(ValueError, match="a forward pre-hook takes no index"):
        nice_hooks.register_forward_pre_hook(chain, ["0", "1[0]"], print)
    with pytest.raises(ValueError, match="is not an index"):
        run(chain, X, forward_hooks={"0": print}, with_activations={"1[x]": 0.0})
    assert not any("forward" in vars(module) for module in chain.modules())


def test_the_same_pattern_twice_runs_a_hook_twice(chain: nn.Sequential) -> None:
    calls: list[str] = []
    run(chain, X, forward_hooks={("0", "0"): lambda module, path, args, output: calls.append(str(path))})
    assert calls == ["0", "0"]


def test_a_hook_that_is_there_already_warns_and_runs_twice(chain: nn.Sequential) -> None:
    calls: list[str] = []

    def note(module: nn.Module, path: ModulePath, args: Any, output: Any) -> None:
        calls.append(str(path))

    nice_hooks.register_forward_hook(chain, "0", note)
    nice_hooks.register_forward_hook(chain, "0", lambda *_: None)
    nice_hooks.register_full_backward_hook(chain, "0", lambda *_: None)
    nice_hooks.register_full_backward_hook(chain, "0", lambda *_: calls.append("another"))
    with pytest.warns(hl.HooklineWarning, match="'0' has the same edit hook from another Hooks already"):
        nice_hooks.register_forward_hook(chain, "0", note)
    chain(X)
    hl.clear(chain)
    assert calls == ["0", "0"]


def test_a_registered_hook_keeps_no_model_alive(chain: nn.Sequential) -> None:
    model = copy.deepcopy(chain)
    nice_hooks.register_forward_hook(model, "**", lambda *_: None)
    nice_hooks.register_full_backward_hook(model, "**", lambda *_: None)
    model(X)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_run_leaves_no_cycle(chain: nn.Sequential) -> None:
    class Hook:
        def __call__(self, *args: Any) -> None: ...

    hook = Hook()
    gone = weakref.ref(hook)
    gc.disable()
    try:
        _, cache = run(chain, X, forward_hooks={"0": hook}, return_activations=["0"], with_activations={"1": X})
        del hook
        assert gone() is None
        assert list(cache) == ["0"]
    finally:
        gc.enable()


def test_a_copy_of_a_hooked_model_is_not_hooked(chain: nn.Sequential) -> None:
    calls: list[str] = []
    with nice_hooks.register_forward_hook(chain, "0", lambda module, path, args, output: calls.append("x")):
        copy.deepcopy(chain)(X)
        assert calls == []
        chain(X)
    assert calls == ["x"]


# Silence is gone.


def test_a_path_that_matches_nothing_warns_at_the_users_line(model: nn.Module) -> None:
    with pytest.warns(hl.HooklineWarning, match="'mod3' matches nothing in Model; did you mean 'mod1'") as warned:
        _, cache = run(model, X, return_activations=["mod3"])
    assert warned[0].filename == __file__
    assert cache == {}
    assert type(cache) is ActivationCache
    with pytest.warns(hl.HooklineWarning, match="'mod1.*.weight' matches nothing") as warned:
        nice_hooks.register_forward_hook(model, "mod1.*.weight", print)
    assert warned[0].filename == __file__
    for keyword in ("forward_hooks", "forward_pre_hooks", "full_backward_hooks", "with_activations"):
        with pytest.warns(hl.HooklineWarning, match="'mod' matches nothing"):
            run(model, X, **{keyword: {"mod": print}})


def test_a_container_that_is_never_called_warns_by_name_and_is_passed_over_by_a_pattern(model: nn.Module) -> None:
    with pytest.warns(hl.HooklineWarning, match="'blocks' is a ModuleList, which is never called; did you mean"):
        run(model, X, return_activations=["blocks"])
    assert list(run(model, X, return_activations=["bl**"])[1]) == ["blocks.0"]


@pytest.mark.parametrize("keyword", ["forward_hooks", "forward_pre_hooks", "full_backward_hooks", "with_activations"])
def test_a_module_that_never_ran_warns_and_says_why(model: nn.Module, keyword: str) -> None:
    with pytest.warns(hl.HooklineWarning, match="'unused.*' was not called in 1 forward of Model: .* branch") as warned:
        run(model, X, **{keyword: {"unused": lambda *_: None}})
    assert warned[0].filename == __file__
    register = {"forward_hooks": nice_hooks.register_forward_hook}.get(keyword, nice_hooks.register_forward_pre_hook)
    with pytest.warns(hl.HooklineWarning, match="was not called"), register(model, "unused", print):
        model(X)


@pytest.mark.parametrize("keyword", ["forward_hooks", "forward_pre_hooks", "full_backward_hooks", "with_activations"])
def test_a_module_that_a_pattern_finds_may_be_left_out(model: nn.Module, keyword: str) -> None:
    given = {"un*": 0.0, "un*[0]": 0.0} if keyword == "with_activations" else {"un*": lambda *_: None}
    run(model, X, **{keyword: given}, return_activations=["un*", "mod2"])  # type: ignore[arg-type]
    with torch.no_grad(), nice_hooks.register_full_backward_hook(model, "**", print):
        model(X)


def test_names_that_never_ran_warn_once_together(model: nn.Module) -> None:
    wanted = ["unused", "mod1", "unused[0]", "unused[*]"]
    with pytest.warns(hl.HooklineWarning, match=r"'unused' was not called .* \(and 2 more\)$") as warned:
        _, cache = run(model, X, return_activations=wanted)
    assert [one.filename for one in warned] == [__file__]
    assert list(cache) == ["mod1"]


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
def test_a_real_model_warns_of_nothing(name: str) -> None:
    real_models = pytest.importorskip("tests.real_models")
    model = getattr(real_models, name)()
    inputs = {"input_ids": real_models.ids(), **({"decoder_input_ids": real_models.ids()} if name == "t5" else {})}
    hooks = {"**": lambda *_: None}
    result, cache = run(model, **inputs, return_activations=True, forward_hooks=hooks, full_backward_hooks=hooks)
    assert cache[""][0] is result[0]
    assert list(cache) == list(run(model.eval(), **inputs, return_activations=True)[1])
    result[0].sum().backward()


def test_a_child_that_is_replaced_while_the_model_runs_is_left_out() -> None:
    class Replacing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.head = nn.Linear(4, 2)
            return self.head(x)  # type: ignore[no-any-return]

    model = Replacing()
    assert list(run(model, X, return_activations=True, forward_hooks={"**": lambda *_: None})[1]) == [""]
    with pytest.warns(hl.HooklineWarning, match="'head' was not called"):
        run(model, X, return_activations=["head"])
    with pytest.warns(hl.HooklineWarning, match="'head' was"):
        run(model, X, forward_hooks={"head": lambda *_: None})


def test_what_runs_in_a_torch_jit_graph_is_passed_over() -> None:
    model = nn.Sequential(torch.jit.script(nn.ReLU()), nn.Linear(4, 5))
    assert list(run(model, X, return_activations=True)[1]) == ["1", ""]
    with pytest.warns(hl.HooklineWarning, match="'0' is compiled by torch.jit"):
        run(model, X, return_activations=["0"])


def test_hooklines_own_marks_are_no_paths(model: nn.Module) -> None:
    for path in ("mod2:input", "mod2#0", "mod2/linear"):
        with pytest.warns(hl.HooklineWarning, match=f"'{path}' names no module and no method"):
            run(model, X, return_activations=[path])


def test_a_tied_module_answers_to_each_name() -> None:
    layer = nn.Linear(3, 3)
    tied = nn.Sequential(layer, layer)
    result, cache = run(tied, torch.ones(1, 3), return_activations=["1", "**"])
    assert paths(tied, "**") == ["", "0"]
    assert list(cache) == ["1", "0", ""]
    assert all(value.equal(result) for value in cache.values())  # Of the two calls, the last.


def test_a_compiled_model_is_hooked(chain: nn.Sequential) -> None:
    compiled: Any = torch.compile(chain, backend="eager")
    seen: list[str] = []
    note = {"_orig_mod.*": lambda module, path, args, output: seen.append(str(path))}
    result, cache = run(compiled, X, return_activations=True, with_activations={"1": 1.0 - X}, forward_hooks=note)
    assert paths(compiled, "**") == ["", "_orig_mod", "_orig_mod.0", "_orig_mod.1"]
    assert seen == ["_orig_mod.0", "_orig_mod.1"]
    assert list(cache) == ["_orig_mod.0", "_orig_mod.1", "", "_orig_mod"]  # The last two are one module.
    assert result.equal(1 - X)
    with torch.no_grad():  # A part of a graph that dynamo resumes warns of a .grad, by itself.
        assert list(run(compiled, X, return_activations=["0[0]", "_orig_mod.0[1]"])[1]) == ["0[0]", "_orig_mod.0[1]"]


def test_one_registration_is_no_twin_of_itself(chain: nn.Sequential) -> None:
    class Half(nn.Module):
        def forward(self, *values: Any) -> Any:
            return values[-1] / 2

    calls: list[str] = []

    def note(module: nn.Module, path: ModulePath, args: Any, output: Any) -> None:
        calls.append(str(path))

    compiled: Any = torch.compile(chain, backend="eager")
    with nice_hooks.register_forward_hook(compiled, "**", note), nice_hooks.register_forward_hook(chain, "0", Half()):
        handle = nice_hooks.register_forward_hook(chain, ["0", "0"], Half())  # Another one that prints the same.
        result = compiled(X)
        with handle.handles[0]:
            pass
        handle.remove()
    assert calls == ["_orig_mod.0", "_orig_mod.1", "", "_orig_mod"]
    assert result.allclose(chain(X) / 8)


# Pre-hooks.


def test_a_forward_pre_hook_replaces_the_arguments(model: nn.Module) -> None:
    seen: list[Any] = []

    def double(module: nn.Module, path: ModulePath, args: tuple[Any, ...]) -> Any:
        seen.append((module, path, args))
        return args[0] * 2

    with nice_hooks.register_forward_pre_hook(model, "mod2", double):
        result = model(X)
    assert result.equal(model.blocks[0](model.mod2(model.mod1(X) * 2)))
    assert seen[0][:2] == (model.mod2, ModulePath("mod2", None))
    assert len(seen[0][2]) == 1
    assert run(model, X, scale=2.0, forward_pre_hooks={"": lambda module, path, args: (args[0] * 2,)}).equal(
        model(X * 2, scale=2.0)
    )
    assert run(model, X, forward_pre_hooks={"": lambda module, path, args: (*args, 3.0)}).equal(model(X, 3.0))
    assert run(model, X, 2.0, forward_pre_hooks={"": lambda module, path, args: args[:1]}).equal(model(X))
    assert run(model, X, 2.0, forward_pre_hooks={"": lambda module, path, args: None}).equal(model(X, 2.0))


def test_a_forward_pre_hook_of_a_module_with_any_arguments() -> None:
    class Sum(nn.Module):
        def forward(self, first: float, *others: float, factor: float = 1.0) -> float:
            return (first + sum(others)) * factor

    seen: list[Any] = []
    total = Sum()
    for args, keywords in (((1.0,), {}), ((1.0, 2.0), {}), ((1.0, 2.0, 3.0), {"factor": 2.0}), ((), {"first": 1.0})):
        hook = {"": lambda module, path, args: seen.append(args)}
        assert run(total, *args, **keywords, forward_pre_hooks=hook) == total(*args, **keywords)  # type: ignore[arg-type]
        assert seen[-1] == args
    hook = {"": lambda module, path, args: (*args, 10.0, 10.0)}  # type: ignore[dict-item]
    assert run(total, 1.0, 2.0, factor=2.0, forward_pre_hooks=hook) == 46.0


def test_a_forward_pre_hook_that_gives_an_argument_twice_or_too_many_is_refused() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return super().forward(input) * scale

    layer = Scaled(4, 2)
    instead = {"": lambda module, path, args: (X * 0,)}
    with pytest.raises(TypeError, match=r"^Scaled.forward\(\) got multiple values for argument 'input'"):
        run(layer, input=X, forward_pre_hooks=instead)
    with pytest.raises(TypeError, match=r"^Scaled.forward\(\) got too many positional arguments"):
        run(layer, X, forward_pre_hooks={"": lambda module, path, args: (X, 1.0, 2.0)})
    assert run(layer, X, scale=2.0, forward_pre_hooks=instead).equal(layer(X * 0, scale=2.0))


# Backward hooks.


def test_a_backward_hook_gets_both_gradients(model: nn.Module) -> None:
    seen: dict[str, Any] = {}

    def hook(module: nn.Module, path: ModulePath, grad_input: Any, grad_output: Any) -> None:
        assert str(path) not in seen
        assert module is dict(model.named_modules())[str(path)]
        seen[str(path)] = grad_input, grad_output

    with nice_hooks.register_full_backward_hook(model, ["mod2", "blocks.0", "mod1.0"], hook):
        model(X).sum().backward()
    grad = torch.ones(2, 5) @ model.blocks[0].weight
    assert list(seen) == ["blocks.0", "mod2", "mod1.0"]
    assert seen["blocks.0"][0][0].allclose(grad)
    assert seen["blocks.0"][1][0].equal(torch.ones(2, 5))
    assert seen["mod2"][1][0].allclose(grad)
    assert seen["mod2"][0][0].allclose(grad @ model.mod2.weight)
    assert seen["mod1.0"][0] == (None,)  # X requires no gradient.


@pytest.mark.parametrize("wrap", [lambda gradient: gradient, lambda gradient: (gradient,)])
def test_what_a_backward_hook_returns_replaces_the_gradient_of_the_input(model: nn.Module, wrap: Any) -> None:
    result = run(model, X, full_backward_hooks={"mod2": lambda module, path, inputs, outputs: wrap(inputs[0] * 3)})
    result.sum().backward()
    thrice = model.mod1[0].weight.grad.clone()
    model.zero_grad()
    model(X).sum().backward()
    assert thrice.allclose(model.mod1[0].weight.grad * 3)
    assert thrice.any()


def test_backward_hooks_of_a_run_fire_after_it(model: nn.Module) -> None:
    calls: list[str] = []
    result = run(
        model,
        X,
        full_backward_hooks={"mod*": lambda module, path, grad_input, grad_output: calls.append(f"{path}")},
        full_backward_pre_hooks={"mod*": lambda module, path, grad_output: calls.append(f"before {path}")},
    )
    assert not any("forward" in vars(module) for module in model.modules())
    result.sum().backward()
    assert calls == ["before mod2", "mod2", "before mod1", "mod1"]


@pytest.mark.parametrize("wrap", [lambda gradient: gradient, lambda gradient: (gradient,)])
def test_a_backward_pre_hook_replaces_the_gradient(model: nn.Module, wrap: Any) -> None:
    seen: list[Any] = []

    def hook(module: nn.Module, path: ModulePath, grad_output: Any) -> Any:
        seen.append((module, str(path), len(grad_output)))
        return wrap(grad_output[0] * 0)

    with nice_hooks.register_full_backward_pre_hook(model, "mod2", hook):
        model(X).sum().backward()
    assert seen == [(model.mod2, "mod2", 1)]
    assert not model.mod2.weight.grad.any()
    assert model.blocks[0].weight.grad.any()


def test_a_backward_hook_sees_what_a_pre_hook_returned(model: nn.Module) -> None:
    seen: list[torch.Tensor] = []
    run(
        model,
        X,
        full_backward_hooks={"mod2": lambda module, path, grad_input, grad_output: seen.extend(grad_output)},
        full_backward_pre_hooks={"mod2": lambda module, path, grad_output: grad_output[0] * 0},
    ).sum().backward()
    assert not seen[0].any()


def test_a_backward_pre_hook_gets_the_gradients_of_a_tuple_together() -> None:
    gru, seen = nn.GRU(4, 3), []

    def note(_module: nn.Module, path: nice_hooks.ModulePath, grad: Any) -> None:
        seen.append((str(path), grad))

    with nice_hooks.register_full_backward_pre_hook(gru, "", note):
        output, last = gru(X)
        (output.sum() + 2 * last.sum()).backward()
    ((path, (of_output, of_last)),) = seen
    assert path == ""
    assert of_output.equal(torch.ones(2, 3))
    assert of_last.equal(torch.full((1, 3), 2.0))


def test_a_backward_hook_may_change_the_gradients_of_several_inputs() -> None:
    module = nn.Bilinear(2, 3, 1)
    one, two = torch.ones(1, 2, requires_grad=True), torch.ones(1, 3, requires_grad=True)
    with nice_hooks.register_full_backward_hook(
        module, "", lambda module, path, grad_input, grad_output: tuple(grad * 0 + 5 for grad in grad_input)
    ):
        module(one, two).sum().backward()
    assert one.grad is not None
    assert two.grad is not None
    assert one.grad.eq(5).all()
    assert two.grad.eq(5).all()


def test_none_from_a_backward_hook_cuts_the_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    run(model, X, full_backward_hooks={"1": lambda *_: (None,)}).sum().backward()
    assert not model[0].weight.grad.any()
    assert model[1].weight.grad.any()
    model.zero_grad()
    run(model, X, full_backward_pre_hooks={"1": lambda *_: (None,)}).sum().backward()
    assert not model[1].weight.grad.any()
    module = nn.Bilinear(2, 3, 1)
    one, two = torch.ones(1, 2, requires_grad=True), torch.ones(1, 3, requires_grad=True)
    hook = {"": lambda module, path, grad_input, grad_output: (None, grad_input[1] * 2)}
    run(module, one, two, full_backward_hooks=hook).sum().backward()
    assert one.grad is None
    assert two.grad.allclose(2 * module.weight.sum(1)[0])  # type: ignore[union-attr]


def test_a_gradient_where_none_comes_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 5))  # With torch a RuntimeError: no input requires one.
    result = run(model, X, full_backward_hooks={"0": lambda *_: (torch.ones(2, 4),)})
    with pytest.raises(hl.EditError, match="a gradient was returned in place 0, where none comes; return None there"):
        result.sum().backward()


def test_a_backward_hook_gets_and_changes_the_gradients_of_positional_inputs() -> None:
    module, seen = nn.Bilinear(2, 3, 1), []

    def double(module: nn.Module, path: ModulePath, grad_input: Any, grad_output: Any) -> Any:
        seen.append(grad_input)
        return (grad_input[0] * 2,)

    one, two = torch.ones(1, 2, requires_grad=True), torch.ones(1, 3, requires_grad=True)
    run(module, one, input2=two, full_backward_hooks={"": double}).sum().backward()
    assert [len(gradients) for gradients in seen] == [1]
    assert one.grad is not None
    assert one.grad.allclose(2 * module.weight.sum(2)[0])
    assert two.grad is not None
    assert two.grad.allclose(module.weight.sum(1)[0])


@pytest.mark.parametrize(
    ("register", "what"),
    [
        (nice_hooks.register_forward_pre_hook, "forward pre-hook"),
        (nice_hooks.register_full_backward_hook, "backward hook"),
        (nice_hooks.register_full_backward_pre_hook, "backward pre-hook"),
    ],
)
def test_an_index_is_refused_where_it_means_nothing(chain: nn.Sequential, register: Any, what: str) -> None:
    with pytest.raises(ValueError, match=rf"'0\[:,1\]': a {what} takes no index; take the part inside the hook"):
        register(chain, "0[:, 1]", print)


def test_a_gradient_that_cannot_come_warns(chain: nn.Sequential) -> None:
    with (
        pytest.warns(hl.HooklineWarning, match="'0:grad_output' can get no gradient: torch.no_grad is on"),
        torch.no_grad(),
    ):
        run(chain, X, full_backward_pre_hooks={"0": print})


def test_gradients_are_those_of_the_module_alone() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x)  # type: ignore[no-any-return]

    model, seen = Residual(), []
    x = X.clone().requires_grad_()
    hook = {"inner": lambda module, path, grad_input, grad_output: seen.append(grad_input[0])}
    run(model, x, full_backward_hooks=hook).sum().backward()
    assert seen[0].allclose(torch.ones(2, 4) @ model.inner.weight)


# run.


def test_hooks_see_outputs_before_they_are_patched_and_the_cache_after(chain: nn.Sequential) -> None:
    seen: list[torch.Tensor] = []
    _, cache = run(
        chain,
        X,
        return_activations=["0"],
        with_activations={"0": torch.zeros(2, 5)},
        forward_hooks={"0": lambda module, path, args, output: seen.append(output)},
    )
    assert seen[0].equal(chain[0](X))
    assert not cache["0"].any()


def test_all_six_keywords_together(model: nn.Module) -> None:
    order: list[str] = []
    result, cache = run(
        model,
        X,
        return_activations="mod2",
        with_activations={"mod2[0]": 0.0},
        forward_hooks={"mod2": lambda *_: order.append("forward")},
        forward_pre_hooks={"mod2": lambda *_: order.append("pre")},
        full_backward_hooks={"mod2": lambda *_: order.append("backward")},
        full_backward_pre_hooks={"mod2": lambda *_: order.append("backward pre")},
        scale=2.0,
    )
    result.sum().backward()
    assert order == ["pre", "forward", "backward pre", "backward"]
    assert not cache["mod2"][0].any()


@pytest.mark.parametrize("nothing", [None, False, []])
def test_without_activations_the_result_comes_alone(chain: nn.Sequential, nothing: Any) -> None:
    assert run(chain, X, return_activations=nothing).equal(chain(X))


def test_cached_values_keep_the_graph_and_are_not_overwritten(model: nn.Module) -> None:
    x = X.clone().requires_grad_()
    result, cache = run(model, x, return_activations=["mod1.*", "mod2", ""])
    expected = X @ model.mod1[0].weight.T + model.mod1[0].bias
    assert cache["mod1.0"].allclose(expected)
    assert (expected < 0).any()
    assert cache[""] is result
    assert cache["mod2"].requires_grad
    assert torch.autograd.grad(result.sum(), cache["mod2"])[0].allclose(torch.ones(2, 5) @ model.blocks[0].weight)


def test_a_patched_value_is_not_overwritten_and_gets_its_gradient(model: nn.Module) -> None:
    given = -torch.ones(2, 5)
    run(model, X, with_activations={"mod1.0": given})  # The ReLU behind it writes in place.
    assert given.equal(-torch.ones(2, 5))
    given = torch.ones(5, requires_grad=True)
    run(model, X, with_activations={"mod2[0]": given}).sum().backward()
    assert given.grad is not None
    assert given.grad.allclose(model.blocks[0].weight.sum(0))


def test_the_last_call_of_a_module_is_cached() -> None:
    layer = nn.Linear(3, 3)
    twice = nn.Sequential(layer, layer)
    result, cache = run(twice, torch.ones(1, 3), return_activations=True)
    assert list(cache) == ["0", ""]
    assert cache["0"].equal(result)


class Halved(nn.Module):
    """Calls itself on halves, and on one that is too long for it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.short(x)
        except ValueError:
            return torch.cat([self(half) for half in x.chunk(2)])

    def short(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 2:
            raise ValueError(len(x))
        return self.linear(x)  # type: ignore[no-any-return]


class Again(nn.Module):
    """Calls a module a second time, not inside the first."""

    def __init__(self, halved: Halved) -> None:
        super().__init__()
        self.halved = halved

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.halved(x).sum() + self.halved(x[:2])  # type: ignore[no-any-return]


def test_of_a_module_that_calls_itself_the_call_that_ended_last_is_cached() -> None:
    model = nn.Sequential(Halved(), nn.ReLU(inplace=True))
    x = torch.randn(7, 4)
    result, cache = run(model, x, return_activations=True)
    assert list(cache) == ["0.linear", "0", "1", ""]
    assert cache[""] is result
    assert cache["0"].equal(model[0](x))  # As it was before the ReLU.
    assert cache["0"].lt(0).any()
    assert cache["0.linear"].shape == (1, 1)
    _, cache = run(model, x, return_activations=["0", "0[0]", "0[*]"])
    assert [len(value) for value in cache.values()] == [7, *[1] * 7]
    assert cache["0[6]"].equal(model[0](x)[6])
    result, cache = run(model[0], x, return_activations=True)
    assert torch.autograd.grad(result.sum(), cache[""])[0].eq(1).all()
    assert run(Again(model[0]), x, return_activations=True)[1]["halved"].shape == (2, 1)


def test_of_a_container_that_is_called_by_what_it_holds_too() -> None:
    class Down(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.top[0](half) for half in x.chunk(2)]) if len(x) > 1 else x + 1

    model = nn.Sequential(Down())
    model[0].top = [model]
    result, cache = run(model, X, return_activations=True)
    assert {name: len(value) for name, value in cache.items()} == {"0": 2, "": 2}
    assert result.equal(X + 1)


def test_of_a_method_that_calls_itself_too() -> None:
    class Power(nn.Module):
        def times(self, x: torch.Tensor, left: int) -> torch.Tensor:
            return x if not left else self.times(x, left - 1) * 2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.times(x, 3) + 1

    nice_hooks.patch_method_to_module(Power, "times")
    assert run(Power(), X, return_activations=["times"])[1]["times"].equal(X * 8)


def test_values_that_are_no_tensors_are_cached_as_they_are() -> None:
    class Odd(nn.Module):
        def forward(self, value: Any) -> Any:
            return value

    for value in (None, {"a": 1}, (1, "b"), threading.Lock(), (one for one in "abc")):
        assert run(nn.Sequential(Odd()), value, return_activations=["0"])[1] == {"0": value}
        if value is not None:
            assert run(nn.Sequential(Odd()), X, with_activations={"0": value}) == value
    assert run(nn.Sequential(Odd()), X, with_activations={"0": None}).equal(X)


def test_a_part_of_a_dict_has_no_path() -> None:
    class Named(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"a": x}

    for keywords in ({"return_activations": ["[*]"]}, {"forward_hooks": {"[*]": print}}):
        with pytest.raises(hl.SiteError, match=r"a dict passes here, and '\*' counts the items of tensors"):
            run(Named(), X, **keywords)  # type: ignore[arg-type]


def test_a_module_with_a_forward_hook_of_torchs_own_warns_of_the_patch(chain: nn.Sequential) -> None:
    handle = chain[0].register_forward_hook(lambda module, args, output: output * 0)
    with pytest.warns(hl.HooklineWarning, match="'0' has a forward hook of torch's own, which gets the new") as said:
        result = run(chain, X, with_activations={"0": torch.ones(2, 5)})
    assert said[0].filename == __file__
    assert not result.any()
    with pytest.warns(hl.HooklineWarning, match=r"'0' .* own \(and 1 more\)"):
        run(chain, X, with_activations={"0[0]": 1.0, "*[1]": 1.0})
    assert run(chain, X, return_activations=["0"], forward_hooks={"0": lambda *_: None})[1]["0"].any()
    handle.remove()
    inner = Inner()
    nice_hooks.patch_method_to_module(Inner, "inner_calc")
    inner.register_forward_hook(lambda module, args, output: None)
    assert run(inner, X, with_activations={"inner_calc": X}).equal(X + 1)  # It is on the module, not on its method.


def test_without_hooks_anything_that_can_be_called_is_called(chain: nn.Sequential) -> None:
    assert run(functools.partial(chain), X, forward_hooks={}, return_activations=False).equal(chain(X))
    with pytest.raises(hl.SiteError, match="a model is a torch.nn.Module, not partial"):
        run(functools.partial(chain), X, return_activations=True)


def test_what_is_no_mapping_is_shown(chain: nn.Sequential) -> None:
    with pytest.raises(TypeError, match="with_activations is a mapping, as in {'h.0': ...}, not str"):
        run(chain, X, with_activations="0")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="forward_hooks is a mapping, as in {'h.0': ...}, not list"):
        run(chain, X, forward_hooks=[("0", print)])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"a path is text, .* not NoneType"):
        nice_hooks.register_forward_hook(chain, None, print)  # type: ignore[arg-type]


def test_the_modules_of_a_model_are_listed_once() -> None:
    class Listed(nn.Sequential):
        listed = 0

        def named_modules(self, *args: Any, **kwargs: Any) -> Any:
            self.listed += 1
            return super().named_modules(*args, **kwargs)

    model = Listed(*(nn.ReLU() for _ in range(50)))
    _, cache = run(model, X, return_activations=True)
    model.listed = 0
    assert run(model, X, with_activations=cache, forward_hooks={"*": lambda *_: None}).equal(X.relu())
    assert len(expand_module_path(model, list(cache))) == 51
    assert model.listed == 2


@pytest.mark.parametrize("given", [["**[*]", "**[0]"], ["**[0]", "**[*]"], ["*[0]", "*", "*[*]", "0"]])
def test_keys_come_in_the_order_in_which_values_pass(chain: nn.Sequential, given: list[str]) -> None:
    _, cache = run(chain, X, return_activations=given)
    own = {"[*]": ["[0]", "[1]"], "[0]": ["[0]"], "": [""]}
    parts = [part for path in given for part in own[path.lstrip("*0")]]
    assert list(cache) == list(dict.fromkeys(name + part for name in ("0", "1", "") for part in parts))


def test_a_cache_patches_another_run(model: nn.Module) -> None:
    _, clean = run(model, X, return_activations=["mod*"])
    assert run(model, X * 0, with_activations=clean).equal(model(X))


def test_an_exception_in_the_model_leaves_it_as_it_was(chain: nn.Sequential) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run(chain, X[:, :3], return_activations=True, forward_hooks={"**": print}, with_activations={"0": X})
    assert not any("forward" in vars(module) for module in chain.modules())


def test_two_threads_run_one_model_with_their_own_hooks(chain: nn.Sequential) -> None:
    inside, done = threading.Event(), threading.Event()
    results: list[torch.Tensor] = []

    def wait(*_: Any) -> None:
        inside.set()
        assert done.wait(10)

    run_other = threading.Thread(
        target=lambda: results.append(run(chain, X, with_activations={"1": X * 0}, forward_hooks={"0": wait}))
    )
    run_other.start()
    assert inside.wait(10)
    plain, (_, cache) = chain(X), run(chain, X, return_activations=["0"])
    done.set()
    run_other.join()
    assert not results[0].any()
    assert plain.any()
    assert cache["0"].equal(chain[0](X))


# ActivationCache.


def test_arithmetic_is_on_the_common_keys_in_the_order_of_the_left() -> None:
    one = ActivationCache({"b": torch.ones(2), "a": torch.ones(2), "c": torch.ones(2)})
    other = {"a": torch.full((2,), 2.0), "b": torch.full((2,), 3.0), "d": torch.zeros(1)}
    assert list(one + other) == ["b", "a"]
    assert (one + other)["b"].equal(torch.full((2,), 4.0))
    assert (one - other)["a"].equal(-torch.ones(2))
    assert type(one - other) is ActivationCache
    assert (one * 2)["c"].sum() == 4
    assert (one / 2)["c"].sum() == 1
    for left, right in (({}, one), (one, 1), (one, None)):
        with pytest.raises(TypeError, match="unsupported operand"):
            left + right  # type: ignore[operator]


def test_a_cache_stays_a_cache() -> None:
    cache = ActivationCache({"a": torch.arange(4.0).reshape(2, 2)})
    assert cache.to(torch.float16)["a"].dtype == torch.float16
    assert cache.to("cpu")["a"].device.type == "cpu"
    assert cache.index((slice(None), 0))["a"].tolist() == [0.0, 2.0]
    made = [cache.copy(), cache | {"b": torch.ones(1)}, cache.to("cpu"), cache.index(0), cache * 1]
    assert {type(one) for one in made} == {ActivationCache}
    assert list(made[1]) == ["a", "b"]
    assert made[0] is not cache
    assert isinstance(cache, dict)


# patch_method_to_module.


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def inner_calc(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner_calc(self.linear(x)) + 1


class Overriding(Inner):
    def inner_calc(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


@pytest.fixture
def patched() -> nn.Sequential:
    model = nn.Sequential(Inner(), Overriding(), nn.ReLU())  # Made before the class is patched.
    nice_hooks.patch_method_to_module(Inner, "inner_calc")
    nice_hooks.patch_method_to_module(Inner, "inner_calc")  # A second time does nothing.
    return model


def test_a_method_has_a_path_and_is_hooked_like_a_module(patched: nn.Sequential) -> None:
    assert paths(patched, "**.inner*") == ["0.inner_calc", "1.inner_calc"]
    assert paths(patched, "0.*") == ["0.inner_calc", "0.linear"]
    seen: list[Any] = []
    result, cache = run(
        patched,
        X,
        return_activations=True,
        with_activations={"1.inner_calc[:, 0]": 5.0},
        forward_hooks={"0.inner_calc": lambda module, path, args, output: seen.append((module, str(path), args))},
    )
    assert list(cache)[:3] == ["0.linear", "0.inner_calc", "0"]
    assert cache["0.inner_calc"].equal(cache["0.linear"] * 2)
    assert cache["1.inner_calc"][:, 1:].equal(cache["1.linear"][:, 1:] * 3)
    assert (result[:, 0] == 6).all()
    module, path, (argument,) = seen[0]
    assert module is patched[0]
    assert path == "0.inner_calc"
    assert argument.equal(cache["0.linear"])


def test_a_method_takes_the_other_kinds_of_hooks(patched: nn.Sequential) -> None:
    seen: list[Any] = []
    result = run(
        patched,
        X,
        forward_pre_hooks={"0.inner_calc": lambda module, path, args: (args[0] * 0,)},
        full_backward_hooks={"1.inner_calc": lambda module, path, grad_in, grad_out: seen.append((grad_in, grad_out))},
        full_backward_pre_hooks={"1.inner_calc": lambda module, path, grad_out: (torch.ones_like(grad_out[0]),)},
    )
    result.sum().backward()
    assert result.equal(patched[2](patched[1](torch.ones(2, 4))))
    [((grad_input,), (grad_output,))] = seen
    assert grad_input.equal(torch.full((2, 4), 3.0))
    assert grad_output.equal(torch.ones(2, 4))


def test_nothing_of_a_patched_class_is_touched(patched: nn.Sequential) -> None:
    fresh = nn.Sequential(Inner())
    assert Inner.inner_calc is Inner.__dict__["inner_calc"]
    assert "inner_calc" not in repr(fresh)
    assert list(fresh.state_dict()) == ["0.linear.weight", "0.linear.bias"]
    fresh.eval().to(torch.float64).apply(lambda module: None)
    assert copy.deepcopy(fresh)(X.double()).equal(fresh(X.double()))
    assert [name for name, _ in fresh.named_modules()] == ["", "0", "0.linear"]


def test_a_method_that_is_not_there_or_has_no_calls_is_refused() -> None:
    with pytest.raises(AttributeError, match="type object 'Inner' has no attribute 'other'"):
        nice_hooks.patch_method_to_module(Inner, "other")
    for name in ("forward", "__call__", "__doc__", "dump_patches"):
        with pytest.raises(ValueError, match=f"Inner.{name} is not a method with calls of its own"):
            nice_hooks.patch_method_to_module(Inner, name)
    with pytest.raises(TypeError, match=r"not of one Inner: patch_method_to_module\(Inner, 'inner_calc'\)"):
        nice_hooks.patch_method_to_module(Inner(), "inner_calc")  # type: ignore[arg-type]


def test_a_method_can_be_named_without_patching() -> None:
    class Own(Overriding):
        def other(self, x: torch.Tensor) -> torch.Tensor:
            return x

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.other(x)

    model = nn.Sequential(Own())
    with pytest.warns(hl.HooklineWarning, match=r"'0.other' is a method; did you mean '0.other\(\)'"):
        run(model, X, return_activations=["0.other"])
    assert list(run(model, X, return_activations=["0.other()"])[1]) == ["0.other"]


def test_a_patched_class_is_not_kept_alive() -> None:
    kind = type("Passing", (Inner,), {})
    nice_hooks.patch_method_to_module(kind, "inner_calc")
    gone = weakref.ref(kind)
    del kind
    gc.collect()
    assert gone() is None
