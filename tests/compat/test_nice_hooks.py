"""hookline.compat.nice_hooks: the README's examples, the API name by name, and the original's bugs, fixed."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.compat import nice_hooks
from hookline.compat.nice_hooks import ActivationCache, ModulePath, expand_module_path, run
from tests.errors.wording import says
from tests.support.compat_models import X, paths

RAN = ["mod1.0", "mod1.1", "mod1", "mod2", "blocks.0", ""]


# The README.


def test_the_example_of_registering_prints_what_passes(model: nn.Module, capsys: Any) -> None:
    def my_hook(module: nn.Module, path: nice_hooks.ModulePath, args: Any, output: Any) -> None:
        print(output)  # noqa: T201

    # The README says "path.to.module", but torch allows no child module called "to": it is a method of Module.
    nice_hooks.register_forward_hook(model, "mod1.0", my_hook)  # The hook acts though its handle is not kept.
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
    result, cache = nice_hooks.run(model, X, return_activations=True)  # No warning about `unused`, which did not run.
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
    with pytest.raises(ValueError, match=says("is not an index")) as error:
        ModulePath.parse(f"a[0,{part}]")
    assert repr(part) in str(error.value)


@pytest.mark.parametrize("text", ["a[0][1]", "a[0", "a]", "a[0]b"])
def test_what_is_no_path_is_shown(text: str) -> None:
    with pytest.raises(ValueError, match=says("is not a path")) as error:
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
    with pytest.raises(hl.SiteError, match=says("is not a part of", "(2, 5)", "0[7]")):
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
    with handles:  # All hooks are removed.
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
    with pytest.raises(ValueError, match=says("is not an index")):
        nice_hooks.register_forward_hook(chain, ["0", "1[x]"], print)
    with pytest.raises(ValueError, match="a forward pre-hook takes no index"):
        nice_hooks.register_forward_pre_hook(chain, ["0", "1[0]"], print)
    with pytest.raises(ValueError, match=says("is not an index")):
        run(chain, X, forward_hooks={"0": print}, with_activations={"1[x]": 0.0})
    assert not any("forward" in vars(module) for module in chain.modules())


def test_the_same_pattern_twice_runs_a_hook_twice(chain: nn.Sequential) -> None:
    calls: list[str] = []
    run(chain, X, forward_hooks={("0", "0"): lambda module, path, args, output: calls.append(str(path))})
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


# Mistakes about which the original says nothing.


def test_a_path_that_matches_nothing_warns_at_the_users_line(model: nn.Module) -> None:
    with pytest.warns(
        hl.HooklineWarning, match=says("matches nothing did you mean", "Model", "mod3", "mod1")
    ) as warned:
        _, cache = run(model, X, return_activations=["mod3"])
    assert warned[0].filename == __file__
    assert cache == {}
    assert type(cache) is ActivationCache
    with pytest.warns(hl.HooklineWarning, match=says("weight' matches nothing")) as warned:
        nice_hooks.register_forward_hook(model, "mod1.*.weight", print)
    assert warned[0].filename == __file__
    for keyword in ("forward_hooks", "forward_pre_hooks", "full_backward_hooks", "with_activations"):
        with pytest.warns(hl.HooklineWarning, match="'mod' matches nothing"):
            run(model, X, **{keyword: {"mod": print}})


def test_a_container_that_is_never_called_warns_by_name_and_is_passed_over_by_a_pattern(model: nn.Module) -> None:
    with pytest.warns(hl.HooklineWarning, match=says("is a ModuleList", "blocks")):
        run(model, X, return_activations=["blocks"])
    assert list(run(model, X, return_activations=["bl**"])[1]) == ["blocks.0"]


@pytest.mark.parametrize("keyword", ["forward_hooks", "forward_pre_hooks", "with_activations"])
def test_a_module_that_never_ran_warns_and_says_why(model: nn.Module, keyword: str) -> None:
    with pytest.warns(hl.HooklineWarning, match=says("was not called in forward of Model", 1)) as warned:
        run(model, X, **{keyword: {"unused": lambda *_: None}})
    assert warned[0].filename == __file__


@pytest.mark.parametrize("keyword", ["forward_hooks", "forward_pre_hooks", "full_backward_hooks", "with_activations"])
def test_a_module_that_a_pattern_finds_may_be_left_out(model: nn.Module, keyword: str) -> None:
    given = {"un*": 0.0, "un*[0]": 0.0} if keyword == "with_activations" else {"un*": lambda *_: None}
    run(model, X, **{keyword: given}, return_activations=["un*", "mod2"])  # type: ignore[arg-type]
    with torch.no_grad(), nice_hooks.register_full_backward_hook(model, "**", print):
        model(X)


def test_names_that_never_ran_warn_once_together(model: nn.Module) -> None:
    wanted = ["unused", "mod1", "unused[0]", "unused[*]"]
    with pytest.warns(hl.HooklineWarning, match=says("was not called in forward of Model", "unused", 1)) as warned:
        _, cache = run(model, X, return_activations=wanted)
    assert [one.filename for one in warned] == [__file__]
    assert list(cache) == ["mod1"]


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
def test_a_real_model_warns_of_nothing(name: str) -> None:
    real_models = pytest.importorskip("tests.support.real_models")
    model = getattr(real_models, name)()
    inputs = {"input_ids": real_models.ids(), **({"decoder_input_ids": real_models.ids()} if name == "t5" else {})}
    hooks = {"**": lambda *_: None}
    result, cache = run(model, **inputs, return_activations=True, forward_hooks=hooks)
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
    with pytest.warns(hl.HooklineWarning, match=says("was not called", "head")):
        run(model, X, return_activations=["head"])
    with pytest.warns(hl.HooklineWarning, match=says("was not called more", "head")):
        run(model, X, forward_hooks={"head": lambda *_: None})


def test_what_runs_in_a_torch_jit_graph_is_passed_over() -> None:
    model = nn.Sequential(torch.jit.script(nn.ReLU()), nn.Linear(4, 5))
    assert list(run(model, X, return_activations=True)[1]) == ["1", ""]
    with pytest.warns(hl.HooklineWarning, match=says("compiled by torch", "0")):
        run(model, X, return_activations=["0"])


def test_hooklines_own_marks_are_no_paths(model: nn.Module) -> None:
    for path in ("mod2:input", "mod2#0", "mod2/linear"):
        with pytest.warns(hl.HooklineWarning, match=says("names no module and no", path)):
            run(model, X, return_activations=[path])


def test_a_tied_module_answers_to_each_name() -> None:
    layer = nn.Linear(3, 3)
    tied = nn.Sequential(layer, layer)
    result, cache = run(tied, torch.ones(1, 3), return_activations=["1", "**"])
    assert paths(tied, "**") == ["", "0"]
    assert list(cache) == ["1", ""]  # One module has one key: the name that was asked for first.
    assert all(value.equal(result) for value in cache.values())  # The value of the second call.


def test_a_compiled_model_is_hooked(chain: nn.Sequential) -> None:
    compiled: Any = torch.compile(chain, backend="eager")
    seen: list[str] = []
    note = {"_orig_mod.*": lambda module, path, args, output: seen.append(str(path))}
    result, cache = run(compiled, X, return_activations=True, with_activations={"1": 1.0 - X}, forward_hooks=note)
    assert paths(compiled, "**") == ["", "_orig_mod", "_orig_mod.0", "_orig_mod.1"]
    assert seen == ["_orig_mod.0", "_orig_mod.1"]
    assert list(cache) == ["_orig_mod.0", "_orig_mod.1", ""]
    assert result.equal(1 - X)


def test_one_registration_is_no_twin_of_itself(chain: nn.Sequential) -> None:
    class Half(nn.Module):
        def forward(self, *values: Any) -> Any:
            return values[-1] / 2

    calls: list[str] = []

    def note(module: nn.Module, path: ModulePath, args: Any, output: Any) -> None:
        calls.append(str(path))

    compiled: Any = torch.compile(chain, backend="eager")
    with nice_hooks.register_forward_hook(compiled, "**", note), nice_hooks.register_forward_hook(chain, "0", Half()):
        handle = nice_hooks.register_forward_hook(chain, ["0", "0"], Half())  # Another hook with the same repr.
        result = compiled(X)
        with handle.handles[0]:
            pass
        handle.remove()
    assert calls == ["_orig_mod.0", "_orig_mod.1", "", "_orig_mod"]
    assert result.allclose(chain(X) / 8)
