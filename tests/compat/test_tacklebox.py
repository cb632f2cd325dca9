"""tacklebox: its README, the rest of its manager name by name, and the bugs that are gone. See also its tracking."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import io
import pickle
import re
import subprocess
import sys
import threading
import time
import warnings
import weakref

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.compat.tacklebox import naming
from hookline.compat.tacklebox.hook_management import (
    HookFunction,
    HookHandle,
    HookManager,
    increment_name,
    validate_hook_category,
)
from tests.compat.tacklebox_log import Log

NO_CATEGORY = "zz is not a valid hook category. Choices are: forward_hook, backward_hook, forward_pre_hook, all"

# Most managers here are dropped before anything runs; that this is said has a test of its own.
pytestmark = pytest.mark.filterwarnings("ignore:a HookManager is dropped:hookline.HooklineWarning")


def my_forward_hook(module, inputs, outputs):
    print("Finished forward pass for module %s" % module.name)  # noqa: T201, UP031
    return outputs


def my_forward_pre_hook(module, inputs):
    print("Beginning forward pass for module %s" % module.name)  # noqa: T201, UP031
    return inputs


def my_backward_hook(module, grad_in, grad_out):
    print("Finished backward pass for module %s" % module.name)  # noqa: T201, UP031


def registered(net: nn.Sequential, activate: bool = True) -> HookManager:
    """The manager of the README's quickstart."""
    my_module, other_module, third = net
    more_named_modules = {"third": third}
    hookmngr = HookManager()
    for register, function in (
        (hookmngr.register_forward_hook, my_forward_hook),
        (hookmngr.register_forward_pre_hook, my_forward_pre_hook),
        (hookmngr.register_backward_hook, my_backward_hook),
    ):
        register(
            function, my_module_name=my_module, other_module_name=other_module, activate=activate, **more_named_modules
        )
    return hookmngr


# The README


def test_readme_the_three_kinds_of_hooks_print_the_names_of_their_modules(net, x, capsys):
    hookmngr = registered(net)
    net(x.requires_grad_()).sum().backward()
    assert capsys.readouterr().out.splitlines() == [
        "Beginning forward pass for module my_module_name",
        "Finished forward pass for module my_module_name",
        "Beginning forward pass for module other_module_name",
        "Finished forward pass for module other_module_name",
        "Beginning forward pass for module third",
        "Finished forward pass for module third",
        "Finished backward pass for module third",
        "Finished backward pass for module other_module_name",
        "Finished backward pass for module my_module_name",
    ]
    hookmngr.cleanup()


def test_readme_a_hook_may_be_registered_without_being_activated(net, x, capsys):
    hookmngr = HookManager()
    hookmngr.register_forward_hook(my_forward_hook, my_module_name=net[0], activate=False)
    net(x)
    assert not capsys.readouterr().out
    hookmngr.activate_all_hooks()
    net(x)
    assert capsys.readouterr().out == "Finished forward pass for module my_module_name\n"


def test_readme_hooks_are_activated_by_module_function_and_category(net, x, capsys):
    my_module, other_module, third = net
    hookmngr = registered(net, activate=False)

    def heard() -> list[str]:
        net(x.requires_grad_()).sum().backward()
        return [line.split()[0] + line.split()[1][0] + line[-5:] for line in capsys.readouterr().out.splitlines()]

    assert heard() == []
    hookmngr.activate_all_hooks()
    assert len(heard()) == 9
    hookmngr.deactivate_all_hooks()
    assert heard() == []
    hookmngr.activate_module_hooks(my_module, other_module, third)
    assert len(heard()) == 9
    hookmngr.deactivate_module_hooks(my_module, other_module)
    assert heard() == ["Beginningfthird", "Finishedfthird", "Finishedbthird"]
    hookmngr.deactivate_module_hooks(third)
    hookmngr.activate_all_hook(hook_types=[my_forward_hook])  # The README's typo for activate_all_hooks.
    assert heard() == ["Finishedf_name", "Finishedf_name", "Finishedfthird"]
    hookmngr.deactivate_all_hooks(hook_types=[my_forward_hook])
    assert heard() == []
    hookmngr.activate_all_hooks(category="forward_hook")
    assert len(heard()) == 3
    hookmngr.deactivate_all_hooks(category="forward_hook")
    hookmngr.activate_module_hooks(my_module, third, hook_types=[my_forward_hook], category="forward_pre_hook")
    assert heard() == []
    hookmngr.activate_module_hooks(my_module, hook_types=[my_backward_hook], category="backward_hook")
    assert heard() == ["Finishedb_name"]
    hookmngr.cleanup()


def test_readme_contexts_activate_hooks_for_a_block(net, x, capsys):
    my_module, other_module, _ = net
    hookmngr = registered(net, activate=False)
    with hookmngr.hook_all_context():
        net(x)
    assert len(capsys.readouterr().out.splitlines()) == 6
    with hookmngr.hook_module_context(my_module, other_module, category="forward_hook"):
        net(x)
    assert len(capsys.readouterr().out.splitlines()) == 2
    net(x)
    assert not capsys.readouterr().out


def test_readme_a_handle_switches_one_hook_on_one_module(net, x, capsys):
    my_module = net[0]
    hookmngr = registered(net, activate=False)
    hook_function = hookmngr.function_to_hookfn[my_forward_hook]
    hook_handle = hook_function.module_to_handle[my_module]
    assert hook_handle.module is my_module
    assert hook_handle.hook_fn is hook_function
    hook_handle.activate()  # In the original nothing happens while all other hooks are off.
    net(x)
    assert capsys.readouterr().out == "Finished forward pass for module my_module_name\n"
    hook_handle.deactivate()
    net(x)
    assert not capsys.readouterr().out


def test_readme_hooks_are_looked_up_by_name(net):
    my_module = net[0]
    hookmngr = registered(net)
    assert hookmngr.name_to_module["my_module_name"] is my_module
    hookmngr.register_forward_hook(my_forward_hook, hook_fn_name="my_forward_hook")  # Known by its repr before.
    hook_function = hookmngr.name_to_hookfn["my_forward_hook"]
    assert hook_function.function is my_forward_hook
    handle = hookmngr.name_to_hookhandle["my_forward_hook[my_module_name]"]  # The README writes [my_module].
    assert handle is hook_function.module_to_handle[my_module]
    assert [name.rpartition("[")[2] for name in hookmngr.name_to_hookhandle].count("third]") == 3


def test_readme_hooks_are_removed_by_function_module_and_id(net, x, capsys):
    hookmngr = registered(net)
    hookmngr.register_forward_hook(my_forward_hook, hook_fn_name="my_forward_hook")
    hookmngr.remove_hook_by_name("my_forward_hook[third]")
    hookmngr.remove_hook_function(my_forward_pre_hook)
    hookmngr.remove_module_by_name("my_module_name")
    hookmngr.activate_all_hooks()
    net(x.requires_grad_()).sum().backward()
    assert capsys.readouterr().out.splitlines() == [
        "Finished forward pass for module other_module_name",
        "Finished backward pass for module third",
        "Finished backward pass for module other_module_name",
    ]
    hookmngr.cleanup()


# Registration and names


def test_a_module_without_a_name_is_named_by_its_repr_and_any_number_of_duplicates_stay_apart(x):
    manager, log = HookManager(), Log()
    layers = [nn.Linear(2, 2) for _ in range(4)]
    manager.register_forward_hook(log.hook(), *layers, hook_fn_name="see")
    base = "Linear(in_features=2, out_features=2, bias=True)"
    assert list(manager.name_to_module) == [base, f"{base}_1", f"{base}_2", f"{base}_3"]
    assert list(manager.name_to_hookhandle) == [f"see[{name}]" for name in manager.name_to_module]
    assert [list(manager.name_to_module.values())[i] is layer for i, layer in enumerate(layers)] == [True] * 4
    nn.Sequential(*layers)(x)
    assert len(log.seen) == 4


def test_names_that_clash_are_counted_up(net):
    manager, log = HookManager(), Log()
    for layer in net:
        manager.register_forward_hook(log.hook(), conv=layer, hook_fn_name="f")
    assert list(manager.name_to_module) == ["conv", "conv_1", "conv_2"]
    assert list(manager.name_to_hookfn) == ["f", "f_1", "f_2"]
    assert list(manager.name_to_hookhandle) == ["f[conv]", "f_1[conv_1]", "f_2[conv_2]"]
    names = ["conv", "a_9", "a_b", "_1", "3", "a_", "layer1.0", "a_1_2", ""]
    expected = ["conv_1", "a_10", "a_b_1", "_2", "3_1", "a__1", "layer1.0_1", "a_1_3", "_1"]
    assert [increment_name(name) for name in names] == expected


def test_a_known_module_keeps_its_first_name_with_a_warning(net):
    manager, log = HookManager(), Log()
    manager.register_forward_hook(log.hook(), first=net[0])
    manager.register_forward_hook(log.hook(), net[0], first=net[1])
    with pytest.warns(hl.HooklineWarning, match="registered as 'first' already, so the name 'other'") as said:
        manager.register_forward_hook(log.hook(), other=net[0])
    assert said[0].filename == __file__
    assert list(manager.name_to_module) == ["first", "first_1"]


def test_a_function_that_was_named_keeps_its_name_with_a_warning(net):
    manager, hook = HookManager(), Log().hook()
    manager.register_forward_hook(hook, a=net[0], hook_fn_name="one")
    with pytest.warns(hl.HooklineWarning, match="registered as 'one' already, so the name 'two'"):
        manager.register_forward_hook(hook, b=net[1], hook_fn_name="two")
    manager.register_forward_hook(hook, c=net[2])
    assert list(manager.name_to_hookhandle) == ["one[a]", "one[b]", "one[c]"]


def test_a_function_is_registered_once_on_a_module_and_nothing_of_a_refused_call_stays(net):
    manager, hook = HookManager(), Log().hook()
    manager.register_forward_hook(hook, a=net[0], hook_fn_name="f")
    with pytest.raises(AssertionError, match="Hook function f was already registered with module a"):
        manager.register_forward_hook(hook, b=net[1], c=net[0])
    assert list(manager.name_to_hookhandle) == ["f[a]"]


def test_one_module_given_twice_is_refused_as_a_whole(x):
    manager, log, layer = HookManager(), Log(), nn.Linear(2, 2)
    for given in ({"a": layer, "b": layer}, {"": layer, "zz": 3}):
        with pytest.raises((AssertionError, TypeError), match="already registered with module a|zz=3"):
            manager.register_forward_hook(log.hook(), hook_fn_name="f", **given)
    with pytest.raises(AssertionError, match=re.escape(f"was already registered with module {layer!r}")):
        manager.register_forward_hook(log.hook(), layer, layer)
    layer(x)
    assert not log.seen
    assert not any((manager.modules, manager.hook_fns, manager.name_to_hookfn, manager.function_to_hookfn))
    assert not hasattr(layer, "name")
    hook = log.hook()
    manager.register_forward_hook(hook, layer)
    with pytest.raises(AssertionError, match="already registered"):
        manager.register_forward_hook(hook, layer, hook_fn_name="other")
    assert list(manager.name_to_hookfn) == [repr(hook)]
    layer.name = "mine"
    hook_fn = HookFunction(log.hook(), "forward_hook", name="g")
    with pytest.raises(AssertionError, match="Hook function g was already registered with module mine"):
        hook_fn.register(layer, layer)
    assert not hook_fn.handles


def test_a_registration_that_fails_halfway_leaves_nothing(net, x, monkeypatch):
    manager, log, made = HookManager(), Log(), HookHandle.of_manager

    def fails(hook_fn, module, *rest):
        if module is net[2]:
            raise LookupError("no more")
        return made(hook_fn, module, *rest)

    monkeypatch.setattr(HookHandle, "of_manager", fails)
    with pytest.raises(LookupError, match="no more"):
        manager.register_forward_hook(log.hook(), *net)
    net(x)
    assert not log.seen
    assert not manager.name_to_hookhandle


def test_what_is_no_module_function_or_kind_is_refused(net):
    manager = HookManager()
    with pytest.raises(TypeError, match="a module is a torch.nn.Module, not int"):
        manager.register_forward_hook(print, 3)
    with pytest.raises(
        TypeError, match="activat=False: a module is a torch.nn.Module, not bool; did you mean activate?"
    ):
        manager.register_forward_hook(print, net[0], activat=False)
    with pytest.raises(TypeError, match="a hook is a function, not int"):
        manager.register_forward_hook(3, net[0])
    with pytest.raises(TypeError, match="a hook is a function, not a Linear; the modules come after it"):
        manager.register_forward_hook(net[0])
    with pytest.raises(AssertionError, match="invalid hook type: zz"):
        manager.register_hook("zz", print, net[0])
    with pytest.raises(TypeError, match="wrap_calls is True or False, not a Sequential; modules are given to register"):
        HookManager(net)
    assert not manager.modules
    assert not manager.name_to_hookhandle


def test_the_forward_cache_is_for_backward_hooks(net):
    manager = HookManager()
    only = "retain_forward_cache option is exclusively for backward hooks"
    for refused in (
        lambda: manager.register_forward_hook(print, a=net[0], retain_forward_cache=True),
        lambda: manager.register_forward_pre_hook(print, a=net[0], retain_forward_cache=True),
        lambda: manager.register_hook("forward_hook", print, a=net[0], retain_forward_cache=True),
        lambda: HookFunction(print, "forward_hook", retain_forward_cache=True),
    ):
        with pytest.raises(AssertionError, match=only):
            refused()
    manager.register_forward_hook(print, a=net[0], retain_forward_cache=False)
    assert list(manager.name_to_module) == ["a"]


def test_containers_that_are_never_called_are_registered_with_one_warning():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.ReLU()])
            self.more = nn.ModuleDict({"one": nn.ReLU()})

    manager, net = HookManager(), Named()
    with pytest.warns(hl.HooklineWarning) as said:
        manager.register_forward_hook(Log().hook(), layers=net.layers, more=net.more, hook_fn_name="f")
    text = "f will never be called for 'layers' (ModuleList), 'more' (ModuleDict): there is no forward to call; "
    assert [str(one.message) for one in said] == [text + "register the modules inside"]
    assert said[0].filename == __file__
    manager.activate_all_hooks()
    assert list(manager.name_to_hookhandle) == ["f[layers]", "f[more]"]
    manager.cleanup()
    with pytest.warns(hl.HooklineWarning, match="my_forward_hook will never be called for 'more'"):
        manager.register_forward_hook(my_forward_hook, more=net.more, first=net.layers[0])
    manager.cleanup()
    manager.register_backward_hook(my_backward_hook, **dict(net.named_modules()))  # With what is inside: no warning.
    net.layers.name = "layers"
    with pytest.warns(hl.HooklineWarning, match="f will never be called for 'layers'"):
        HookFunction(Log().hook(), "forward_hook", name="f").register(net.layers)


def test_what_torch_jit_made_is_registered_with_a_warning(x):
    manager, traced = HookManager(), torch.jit.trace(nn.Linear(2, 2), x)
    with pytest.warns(hl.HooklineWarning, match=r"for 'a' \(TopLevelTracedModule\): it is compiled by torch.jit"):
        manager.register_forward_hook(Log().hook(), a=traced, hook_fn_name="f")


def test_registering_many_modules_of_one_repr_counts_each_name_once(monkeypatch):
    counted = []
    monkeypatch.setattr(naming, "increment_name", lambda name: counted.append(name) or increment_name(name))
    manager = HookManager()
    manager.register_forward_hook(my_forward_hook, *(nn.ReLU() for _ in range(20)), activate=False)
    assert len(counted) == 19
    assert list(manager.name_to_module)[-1] == "ReLU()_19"
    manager.remove_module_by_name("ReLU()_7")
    manager.register_forward_hook(my_forward_hook, nn.ReLU(), activate=False)
    assert list(manager.name_to_module)[-1] == "ReLU()_7"  # The first that is free.


def test_all_modules_of_a_network_are_registered_by_their_names(net, x):
    manager, log = HookManager(), Log()
    manager.register_forward_hook(log.hook(), hook_fn_name="f", **dict(net.named_modules()))
    assert list(manager.name_to_hookhandle) == ["f[]", "f[0]", "f[1]", "f[2]"]
    net(x)
    assert len(log.seen) == 4


def test_one_function_can_be_a_hook_of_several_kinds(net, x):
    manager, seen = HookManager(), []

    def hook(module, first, *second):
        seen.append(len(second))

    manager.register_forward_hook(hook, a=net[0], hook_fn_name="hook")
    manager.register_forward_pre_hook(hook, a=net[0], hook_fn_name="hook")
    manager.register_backward_hook(hook, a=net[0])
    manager.register_backward_hook(hook, a=net[0], retain_forward_cache=True, hook_fn_name="more")
    net(x.requires_grad_()).sum().backward()
    assert sorted(seen) == [0, 1, 1, 3]
    assert list(manager.name_to_hookfn) == ["hook", "hook_1", repr(hook), "more"]
    assert manager.function_to_hookfn[hook] is manager.name_to_hookfn["hook"]
    manager.remove_hook_function_by_name("hook")
    assert manager.function_to_hookfn[hook] is manager.name_to_hookfn["hook_1"]
    manager.remove_hook_function(hook)
    assert not manager.name_to_hookhandle
    assert not manager.function_to_hookfn


# module.name


def test_a_module_shows_its_name_while_hooked_and_is_then_left_as_found(net):
    before = [dict(vars(module)) for module in net]
    manager = registered(net, activate=False)
    assert [module.name for module in net] == ["my_module_name", "other_module_name", "third"]
    manager.remove_hook_function(my_forward_hook)
    assert net[0].name == "my_module_name"
    manager.remove_module(net[0])
    assert not hasattr(net[0], "name")
    del manager
    assert [dict(vars(module)) for module in net] == before


def test_a_module_keeps_a_name_of_its_own(x):
    class Named(nn.Module):
        @property
        def name(self):
            return "its own"

        def forward(self, x):
            return x

    module, seen, manager = Named(), [], HookManager()
    plain = nn.ReLU()
    plain.name = "mine"
    manager.register_forward_hook(lambda module, inputs, outputs: seen.append(module.name), a=module, b=plain)
    plain(module(x))
    manager.cleanup()
    assert seen == [module.name, plain.name] == ["its own", "mine"]


def test_a_name_that_the_user_gives_meanwhile_stays():
    manager, module = HookManager(), nn.ReLU()
    manager.register_forward_hook(Log().hook(), a=module)
    module.name = "mine"
    manager.cleanup()
    assert module.name == "mine"


def test_a_name_that_the_user_gives_meanwhile_is_what_hooks_read(x):
    first, second, module, seen = HookManager(), HookManager(), nn.ReLU(), []

    def hook(module, inputs, outputs):
        seen.append(module.name)

    first.register_forward_hook(hook, a=module)
    second.register_forward_hook(hook, b=module)
    module.name = "mine"
    module(x)
    first.cleanup()
    module(x)
    assert seen == ["mine"] * 3
    assert copy.deepcopy(module).name == "mine"
    second.cleanup()
    assert module.name == "mine"


def test_a_hook_may_name_its_module(x):
    first, second, module = HookManager(), HookManager(), nn.ReLU()
    first.register_forward_hook(Log().hook(), a=module)
    second.register_forward_hook(lambda module, inputs, outputs: setattr(module, "name", "mine"), b=module)
    module(x)
    assert module.name == "mine"


class Stateful(nn.Linear):
    def __getstate__(self):
        return {**vars(self), "kept": True}


def by_pickle(module: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("kind", [nn.Linear, Stateful])
def test_a_copy_of_a_module_has_no_name_and_no_hooks(x, kind, copied):
    first, second, module, seen = HookManager(), HookManager(), kind(2, 2), []
    first.register_forward_hook(lambda module, *_: seen.append(module.name), old=module)
    assert "name" not in vars(copy.copy(module))
    other = copied(module)
    assert "name" not in vars(other)
    assert "__getstate__" not in vars(other)
    assert getattr(other, "kept", False) is (kind is Stateful)
    second.register_forward_hook(lambda module, *_: seen.append(module.name), new=other)
    assert other(x).equal(module(x))
    assert seen == ["new", "old"]
    second.cleanup()
    first.cleanup()
    assert not hasattr(other, "name")
    assert "__getstate__" not in vars(module)


def test_what_a_hook_keeps_by_name_can_be_saved(x):
    manager, module, kept = HookManager(), nn.ReLU(), {}
    manager.register_forward_hook(lambda module, inputs, outputs: kept.update({module.name: 1}), a=module)
    module(x)
    assert pickle.loads(pickle.dumps(kept)) == copy.deepcopy(kept) == {"a": 1}


def test_two_managers_on_one_module_do_not_disturb_each_other(net, x):
    first, second, seen = HookManager(), HookManager(), []

    def hook(module, *_):
        seen.append(module.name)

    for manager, name in ((first, "one"), (second, "two")):
        manager.register_forward_hook(hook, **{name: net[0]})
        manager.register_backward_hook(hook, **{name: net[0]})
    net(x).sum().backward()
    assert seen == ["one", "two", "one", "two"]
    assert net[0].name == "one"
    del first, manager
    assert net[0].name == "two"
    net(x)
    assert seen[4:] == ["two"]
    second.cleanup()
    assert not hasattr(net[0], "name")


# Activation


def test_an_unknown_category_is_refused_everywhere(net):
    manager = registered(net)
    module = net[0]
    for call in (
        lambda: manager.activate_all_hooks(category="zz"),
        lambda: manager.deactivate_all_hooks(category="zz"),
        lambda: manager.activate_module_hooks(module, category="zz"),
        lambda: manager.deactivate_module_hooks(module, category="zz"),
        lambda: manager.activate_module_hooks_by_name("third", category="zz"),
        lambda: manager.deactivate_module_hooks_by_name("third", category="zz"),
        lambda: manager.get_module_hooks(module, category="zz"),
        lambda: manager.get_module_hooks_by_name("third", category="zz"),
        lambda: manager.hook_all_context(category="zz"),
        lambda: manager.hook_module_context(module, category="zz"),
        lambda: manager.hook_module_context_by_name("third", category="zz"),
        lambda: validate_hook_category(lambda category: category)(category="zz"),
    ):
        with pytest.raises(AssertionError, match=NO_CATEGORY):
            call()
    assert validate_hook_category(lambda category: category)() == "all"


def test_an_unknown_module_or_name_is_a_key_error(net):
    manager, other = registered(net), nn.ReLU()
    for call in (
        lambda: manager.activate_module_hooks(other),
        lambda: manager.deactivate_module_hooks(other),
        lambda: manager.activate_module_hooks_by_name("zz"),
        lambda: manager.deactivate_module_hooks_by_name("zz"),
        lambda: manager.activate_hook_by_name("zz"),
        lambda: manager.deactivate_hook_by_name("zz"),
        lambda: manager.get_module_hooks(other),
        lambda: manager.get_module_hooks_by_name("zz"),
        lambda: manager.is_module_hooked(other),
        lambda: manager.hook_module_context(other),
        lambda: manager.hook_module_context_by_name("zz"),
        lambda: manager.remove_hook_by_name("zz"),
        lambda: manager.remove_hook_function(print),
        lambda: manager.remove_hook_function_by_name("zz"),
        lambda: manager.remove_module(other),
        lambda: manager.remove_module_by_name("zz"),
    ):
        with pytest.raises(KeyError) as caught:
            call()
        if sys.version_info >= (3, 11):
            assert caught.value.__notes__[0].startswith("hookline: not registered with this manager")


def test_an_unknown_name_says_which_are_near(net):
    manager = registered(net)
    with pytest.raises(KeyError) as caught:
        manager.activate_module_hooks_by_name("my_modul_name")
    assert caught.value.args == ("my_modul_name",)
    if sys.version_info >= (3, 11):
        assert "did you mean 'my_module_name' or 'other_module_name'?" in caught.value.__notes__[0]


def test_an_unknown_function_is_told_of(net):
    manager = registered(net)
    with pytest.warns(hl.HooklineWarning, match="which is not registered here") as said:
        manager.activate_all_hooks(hook_types=[print])
    assert said[0].filename == __file__


def test_hooks_are_switched_by_name_and_listed(net):
    manager = registered(net, activate=False)
    manager.register_forward_hook(my_forward_hook, hook_fn_name="f")
    manager.activate_module_hooks_by_name("third", "my_module_name", category="forward_hook")
    manager.activate_module_hooks_by_name("third", hook_types=[my_backward_hook])
    assert [handle.name for handle in manager.get_module_hooks(net[0], include_inactive=False)] == ["f[my_module_name]"]
    assert len(list(manager.get_module_hooks(net[0], include_active=False, include_base_hooks=True))) == 2
    assert len(list(manager.get_module_hooks_by_name("third", include_inactive=False))) == 2
    assert [manager.is_module_hooked(module) for module in net] == [True, False, True]
    assert [manager.is_module_hooked_backward(module) for module in net] == [False, False, True]
    manager.deactivate_module_hooks_by_name("third")
    manager.deactivate_hook_by_name("f[my_module_name]")
    assert not any(handle.active for handle in manager.name_to_hookhandle.values())
    manager.activate_all_hooks([my_forward_hook], "forward_hook")
    assert sum(handle.is_active() for handle in manager.name_to_hookhandle.values()) == 3


# Contexts


def test_a_context_restores_what_was_before(net):
    manager = registered(net, activate=False)
    manager.activate_module_hooks(net[0])
    handles = manager.name_to_hookhandle.values()
    before = [handle.active for handle in handles]
    context = manager.hook_all_context()
    assert [handle.active for handle in handles] == before  # Making it does nothing.
    for _ in range(2):
        with context:
            assert all(handle.active for handle in handles)
        assert [handle.active for handle in handles] == before
    with contextlib.suppress(LookupError), manager.hook_all_context():
        raise LookupError
    assert [handle.active for handle in handles] == before


def test_contexts_nest(net):
    manager = HookManager()
    manager.register_forward_hook(Log().hook(), a=net[0], hook_fn_name="f", activate=False)
    handle = manager.name_to_hookhandle["f[a]"]
    with manager.hook_all_context():
        with manager.hook_module_context(net[0]):
            handle.deactivate()
            assert not handle.active
        assert handle.active
        with manager.hook_all_context():
            assert handle.active
        assert handle.active
    assert not handle.active
    handle.activate()
    with manager.hook_all_context():
        handle.deactivate()
        assert not handle.active
    assert handle.active
    manager.cleanup()


def test_contexts_of_threads_hold_hooks_apart(net):
    manager = HookManager()
    manager.register_forward_hook(Log().hook(), a=net[0], hook_fn_name="f", activate=False)
    handle = manager.name_to_hookhandle["f[a]"]
    first, second = manager.hook_all_context(), manager.hook_all_context()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert handle.active
    thread = threading.Thread(target=second.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    assert not handle.active


def test_threads_switch_a_hook_one_after_the_other(net, monkeypatch):
    manager, inside, most = HookManager(), [], []
    manager.register_forward_hook(Log().hook(), a=net[0], hook_fn_name="f", activate=False)
    handle = manager.name_to_hookhandle["f[a]"]

    def activate():
        inside.append(1)
        time.sleep(0.02)
        most.append(len(inside))
        inside.pop()

    def work():
        with manager.hook_all_context():
            pass

    monkeypatch.setattr(handle.handle, "activate", activate)
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(most) == {1}
    assert not handle.active


def test_a_hook_that_is_activated_meanwhile_acts_until_every_context_is_over(net):
    manager = HookManager()
    manager.register_forward_hook(Log().hook(), a=net[0], hook_fn_name="f", activate=False)
    handle = manager.name_to_hookhandle["f[a]"]
    first, second = manager.hook_all_context(), manager.hook_all_context()
    first.__enter__()
    second.__enter__()
    handle.activate()
    first.__exit__(None, None, None)
    assert handle.active
    second.__exit__(None, None, None)
    assert not handle.active


def test_a_context_holds_its_manager(net, x):
    log = Log()

    def context():
        manager = HookManager()
        manager.register_forward_hook(log.hook("f"), a=net[0], activate=False)
        return manager.hook_all_context(), manager.hook_module_context(net[0])

    for one in context():
        with one:
            net(x)
    assert log.names == ["f", "f"]


def test_contexts_add_up_with_any_other(net, x):
    manager, log = HookManager(), Log()
    manager.register_forward_hook(log.hook(), a=net[0], activate=False)
    with manager.hook_all_context() + torch.no_grad() as nothing:
        assert nothing is None
        assert not net(x).requires_grad
    with torch.no_grad() + manager.hook_all_context():
        assert not net(x).requires_grad
    assert len(log.seen) == 2
    assert net(x).requires_grad
    with manager.hook_all_context() + contextlib.suppress(LookupError):
        raise LookupError
    with pytest.raises(AssertionError, match="context object '3' is missing '__enter__' or '__exit__' methods"):
        manager.hook_all_context() + 3


def test_functions_run_around_a_context(net):
    manager, log = HookManager(), []
    manager.register_forward_hook(Log().hook(), a=net[0], hook_fn_name="f", activate=False)
    handle = manager.name_to_hookhandle["f[a]"]
    with manager.hook_module_context_by_name(
        "a", add_enter_fns=[lambda: log.append(handle.active)], add_exit_fns=[lambda: log.append(handle.active)]
    ):
        log.append(handle.active)
    assert log == [False, True, False]
    with pytest.raises(ZeroDivisionError), manager.hook_all_context(add_enter_fns=[lambda: 1 / 0]):
        pass
    assert not handle.active


def test_a_failure_on_entering_leaves_what_was_entered(net):
    manager = HookManager()
    manager.register_forward_hook(Log().hook(), a=net[0], hook_fn_name="f", activate=False)

    @contextlib.contextmanager
    def fails():
        raise LookupError
        yield

    with pytest.raises(LookupError), manager.hook_all_context() + fails():
        pass
    assert not manager.name_to_hookhandle["f[a]"].active


def test_a_hook_removed_inside_its_context_stays_removed(net, x):
    manager, log = HookManager(), Log()
    manager.register_forward_hook(log.hook(), a=net[0])
    with manager.hook_all_context():
        manager.cleanup()
    net(x)
    assert not log.seen


# Removal


def test_removal_purges_every_table(net):
    manager = registered(net)
    handle = manager.function_to_hookfn[my_forward_hook].handles[0]
    manager.remove_hook(handle)
    assert len(handle.handle) == 0
    assert handle not in manager.name_to_hookhandle.values()
    assert handle not in manager.module_to_hookhandle[net[0]]
    assert net[0] not in handle.hook_fn.module_to_handle
    with pytest.raises(KeyError):
        manager.remove_hook(handle)
    with pytest.warns(hl.HooklineWarning, match="was removed, and can't be activated"):
        handle.activate()
    assert not handle.active
    manager.remove_hook_function(my_forward_hook)
    assert my_forward_hook not in manager.function_to_hookfn
    assert {one.function for one in manager.hook_fns} == {my_forward_pre_hook, my_backward_hook}
    manager.remove_module(net[0])
    assert list(manager.name_to_module) == ["other_module_name", "third"]
    assert net[0] not in manager.modules
    assert my_backward_hook in manager.function_to_hookfn  # Known by its name when it is registered again.
    manager.name_to_hookhandle.copy().popitem()[1].remove()
    assert len(manager.name_to_hookhandle) == 3
    manager.cleanup()
    tables = (manager.modules, manager.hook_fns, manager.name_to_module, manager.name_to_hookfn)
    assert not any((*tables, manager.name_to_hookhandle, manager.module_to_hookhandle, manager.function_to_hookfn))
    assert all("forward" not in vars(module) for module in net)
    manager.register_forward_hook(my_forward_hook, a=net[0])
    assert net[0].name == "a"
    manager.cleanup()


def test_a_handle_of_another_manager_is_not_removed(net):
    first, second = registered(net), registered(net)
    with pytest.raises(KeyError):
        first.remove_hook(second.module_to_hookhandle[net[0]][0])
    assert len(second.name_to_hookhandle) == len(first.name_to_hookhandle) == 9


def test_a_dropped_manager_takes_its_hooks_along(net, x, capsys):
    gc.disable()
    try:
        manager = registered(net)
        dead = weakref.ref(manager), weakref.ref(next(iter(manager.name_to_hookhandle.values())))
        net(x.requires_grad_()).sum().backward()
        capsys.readouterr()
        del manager
        assert [one() for one in dead] == [None, None]
    finally:
        gc.enable()
    net(x).sum().backward()
    assert not capsys.readouterr().out
    assert all("forward" not in vars(module) for module in net)


def test_a_manager_that_is_dropped_before_its_hooks_were_called_is_told_of(net, x):
    def forgets(manager):
        manager.register_forward_hook(my_forward_hook, first=net[0], second=net[1], hook_fn_name="f")

    said_of = re.escape("a HookManager is dropped before its hooks were called (f[first] and 1 more): keep it in a")
    with pytest.warns(hl.HooklineWarning, match=said_of) as said:
        forgets(HookManager())
    assert said[0].filename == __file__
    assert not hasattr(net[0], "name")


def test_a_manager_that_is_dropped_after_its_work_is_not_told_of(net, x, capsys):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        HookManager().register_forward_hook(my_forward_hook, nn.ModuleList([]))
        manager = registered(net)
        net[0](x)  # The others did not run, and no gradient came.
        del manager
        manager = registered(net, activate=False)
        del manager
        manager = registered(net)
        manager.cleanup()
        del manager
    assert ["will never be called" in str(one.message) for one in said] == [True]


def test_a_manager_that_lives_to_the_end_of_the_program_goes_quietly():
    code = """
from torch import nn
from hookline.compat.tacklebox.hook_management import HookManager
model = nn.Sequential(nn.Linear(2, 2))
manager = HookManager()
manager.register_forward_hook(print, *model)
nn.manager = manager  # So that it is among the last to go.
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class Probe:
    """Has a manager, and is what its hooks are methods of."""

    def __init__(self, *modules):
        self.seen = []
        self.manager = HookManager()
        self.manager.register_forward_pre_hook(self.before, *modules)
        self.manager.register_forward_hook(self.after, *modules)
        self.manager.register_backward_hook(self.back, *modules)

    def before(self, module, inputs):
        self.seen.append("before")

    def after(self, module, inputs, outputs):
        self.seen.append("after")

    def back(self, module, grad_in, grad_out):
        self.seen.append("back")


def test_a_manager_whose_hooks_are_methods_of_its_owner_goes_with_the_owner(net, x):
    probe = Probe(net[0])
    net(x.requires_grad_()).sum().backward()
    assert probe.seen == ["before", "after", "back"]
    gone = weakref.ref(probe)
    del probe
    gc.collect()
    assert gone() is None
    assert not hasattr(net[0], "name")
    assert "forward" not in vars(net[0])


def test_a_manager_that_is_collected_with_its_module_does_no_harm(x):
    gc.disable()
    try:
        module = nn.Linear(2, 2)
        module.probe = Probe(module)
        module(x.requires_grad_()).sum().backward()
        gone = weakref.ref(module)
        del module
        assert gone() is not None
        gc.collect()  # Warnings are errors here, also those of a failing __del__.
        assert gone() is None
    finally:
        gc.enable()


def test_a_hook_function_without_a_manager_stays_on_its_module(x):
    module, log = nn.ReLU(), Log()
    module.name = "relu"
    HookFunction(log.hook("f"), "forward_hook", modules=[module])
    gc.collect()
    module(x)
    assert log.names == ["f"]
    hl.clear(module)


# HookFunction and HookHandle by themselves


def test_a_hook_function_works_without_a_manager(x):
    module, log = nn.ReLU(), Log()
    hook_fn = HookFunction(log.hook("f"), "forward_hook", name="f")
    with pytest.raises(AssertionError, match="Module must be given name before hook registration"):
        hook_fn.register(module)
    module.name = "relu"
    (handle,) = hook_fn.register(module)
    assert repr(handle) == f"<f[relu] {HookHandle} registered to relu (active)>"
    with pytest.raises(AssertionError, match="Hook function f was already registered with module relu"):
        hook_fn.register(module)
    output = module(x)
    assert log.seen[0][2] is output
    hook_fn.deactivate_all_handles()
    module(x)
    assert repr(handle).endswith("(inactive)>")
    with pytest.raises(AssertionError, match="Cannot deactivate hook: Hook is already inactive"):
        handle.deactivate(raise_on_inactive=True)
    handle.activate()
    with pytest.raises(AssertionError, match="Cannot activate hook: Hook is already active"):
        handle.activate(raise_on_active=True)
    handle.set_name("other")
    assert handle.name == "other"
    handle.remove()
    handle.remove()
    assert not hook_fn.handles
    module(x)
    assert len(log.seen) == 1
    assert module.name == "relu"
    assert HookFunction(log.hook(), "forward_hook", modules=[module]).handles[0].active
    hl.clear(module)


def test_hook_functions_and_handles_from_elsewhere_are_taken_in(x):
    manager, module, log = HookManager(), nn.ReLU(), Log()
    module.name = "relu"
    hook_fn = HookFunction(log.hook("f"), "forward_hook", name="f")
    handles = hook_fn.register(module, activate=False, register_to_module=False)
    manager.add_hook_handle(*handles)
    manager.add_hook_fn(hook_fn, HookFunction(print, "forward_hook", name="f"))
    assert list(manager.name_to_hookfn) == ["f", "f_1"]
    assert list(manager.name_to_hookhandle) == ["f[relu]"]
    assert manager.name_to_module == {"relu": module}
    manager.activate_all_hooks()
    module(x)
    assert log.names == ["f"]
    manager.cleanup()
    assert module.name == "relu"


def test_a_hook_function_is_called_with_what_it_names():
    given = nn.ReLU(), (1,), (2,)
    assert HookFunction(lambda m, i, o: o, "forward_hook")(*given) == (2,)
    assert HookFunction(lambda m, i, o: o, "forward_hook")(given[0], inputs=(1,), outputs=(2,)) == (2,)
    assert HookFunction(lambda outputs: outputs, "forward_hook", pass_by_pos=False)(*given) == (2,)
    assert HookFunction(lambda inputs, a=3: a, "forward_hook", pass_by_pos=False)(*given) == 3
    every = HookFunction(lambda **values: list(values), "backward_hook", pass_by_pos=False, retain_forward_cache=True)
    assert every(*given, (3,), (4,)) == ["module", "grad_in", "grad_out", "inputs", "outputs"]
    with pytest.raises(TypeError, match="Call signature should be .module, inputs. but got 3 positional args"):
        HookFunction(print, "forward_pre_hook", name="n")(*given)
    with pytest.raises(TypeError, match=r"requested parameter 'zz' .* parameters are \[module, inputs, outputs\]"):
        HookFunction(lambda zz: zz, "forward_hook", name="n", pass_by_pos=False)(*given)
    assert HookFunction.HOOK_TYPES == ["forward_hook", "backward_hook", "forward_pre_hook"]


def test_a_function_that_was_registered_by_itself_too_can_be_named(net, x):
    manager, hook = HookManager(), Log().hook()
    manager.register_forward_hook(hook, a=net[0])
    net[1].name = "b"
    manager.function_to_hookfn[hook].register(net[1])
    manager.register_forward_hook(hook, hook_fn_name="x")
    assert list(manager.name_to_hookfn) == ["x"]
    assert list(manager.name_to_hookhandle) == ["x[a]"]
    manager.cleanup()


def test_a_handle_of_two_managers_is_in_the_tables_of_neither_once_it_is_removed(net):
    first, second, hook = HookManager(), HookManager(), Log().hook()
    first.register_forward_hook(hook, a=net[0], hook_fn_name="f")
    second.register_forward_hook(hook, a=net[1], hook_fn_name="f")
    (handle,) = first.name_to_hookhandle.values()
    second.add_hook_handle(handle, handle)
    assert list(second.name_to_hookhandle) == ["f[a]", "f[a]_1"]
    second.cleanup()
    assert not first.name_to_hookhandle
    assert first.module_to_hookhandle == {net[0]: []}
    first.cleanup()


def test_an_id_that_is_taken_is_counted_up(x):
    manager, module, log = HookManager(), nn.ReLU(), Log()
    module.name = "relu"
    manager.register_forward_hook(log.hook("own"), relu=module, hook_fn_name="f")
    manager.add_hook_handle(*HookFunction(log.hook("other"), "forward_hook", name="f").register(module))
    assert list(manager.name_to_hookhandle) == ["f[relu]", "f[relu]_1"]
    manager.deactivate_hook_by_name("f[relu]")
    module(x)
    assert log.names == ["other"]
    manager.cleanup()


@pytest.mark.parametrize(
    ("name", "parameters"),
    {
        "__init__": "wrap_calls=True, recursion_depth=0",
        "register_hook": "hook_type, function, *modules, hook_fn_name=None, activate=True, retain_forward_cache=False, "
        "**named_modules",
        "register_forward_hook": "function, *modules, hook_fn_name=None, activate=True, **named_modules",
        "register_forward_pre_hook": "function, *modules, hook_fn_name=None, activate=True, **named_modules",
        "register_backward_hook": "function, *modules, hook_fn_name=None, activate=True, retain_forward_cache=False, "
        "**named_modules",
        "get_module_hooks": "module, hook_types=(), category='all', include_active=True, include_inactive=True, "
        "include_base_hooks=False",
        "get_module_hooks_by_name": "module_name, hook_types=(), **kwargs",
        "activate_all_hooks": "hook_types=(), category='all'",
        "deactivate_all_hooks": "hook_types=(), category='all'",
        "activate_module_hooks": "*modules, hook_types=(), category='all'",
        "deactivate_module_hooks": "*modules, hook_types=(), category='all'",
        "activate_module_hooks_by_name": "*module_names, hook_types=(), category='all'",
        "deactivate_module_hooks_by_name": "*module_names, hook_types=(), category='all'",
        "activate_hook_by_name": "hook_name",
        "deactivate_hook_by_name": "hook_name",
        "hook_all_context": "hook_types=(), add_enter_fns=(), add_exit_fns=(), category='all'",
        "hook_module_context": "*modules, hook_types=(), add_enter_fns=(), add_exit_fns=(), category='all'",
        "hook_module_context_by_name": "*module_names, hook_types=(), add_enter_fns=(), add_exit_fns=(), "
        "category='all'",
        "is_module_hooked": "module",
        "is_module_hooked_backward": "module",
        "remove_hook": "handle",
        "remove_hook_by_name": "handle_name",
        "remove_hook_function": "function",
        "remove_hook_function_by_name": "hook_fn_name",
        "remove_module": "module",
        "remove_module_by_name": "module_name",
        "add_hook_fn": "*hook_fns",
        "add_hook_handle": "*hook_handles",
        "cleanup": "",
    }.items(),
)
def test_a_method_of_the_manager_takes_what_the_original_took(name, parameters):
    assert written(getattr(HookManager, name)) == parameters


def test_functions_and_handles_are_made_as_in_the_original():
    made = "hook_fn, hook_type, name=None, modules=None, pass_by_pos=True, retain_forward_cache=False"
    assert written(HookFunction.__init__) == made
    assert written(HookFunction.register) == "*modules, activate=True, register_to_module=True"
    assert written(HookHandle.__init__) == "hook_fn, module, name, activate=True, register_to_module=True"
    assert written(HookHandle.activate) == "raise_on_active=False"
    assert written(HookHandle.deactivate) == "raise_on_inactive=False"


def written(method) -> str:
    """The parameters of a method as they are written, without self and types."""
    _, *parameters = inspect.signature(method).parameters.values()
    return ", ".join(str(one.replace(annotation=one.empty)) for one in parameters)
