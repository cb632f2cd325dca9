"""tacklebox: its README, the rest of its manager name by name, and the bugs that are fixed."""

from __future__ import annotations

import copy
import pickle

import pytest
from torch import nn

import hookline as hl
from hookline.compat.tacklebox.hook_management import (
    HookFunction,
    HookManager,
    increment_name,
    validate_hook_category,
)
from tests.errors.wording import says
from tests.support.compat_models import Log, my_backward_hook, my_forward_hook, my_forward_pre_hook, registered

NO_CATEGORY = "zz is not a valid hook category. Choices are: forward_hook, backward_hook, forward_pre_hook, all"

# Most managers here are dropped before a forward runs. Another test checks the warning about it.
pytestmark = pytest.mark.filterwarnings("ignore:a HookManager is dropped:hookline.HooklineWarning")


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
    hook_handle.activate()  # In the original this does nothing while all other hooks are off.
    net(x)
    assert capsys.readouterr().out == "Finished forward pass for module my_module_name\n"
    hook_handle.deactivate()
    net(x)
    assert not capsys.readouterr().out


def test_readme_hooks_are_looked_up_by_name(net):
    my_module = net[0]
    hookmngr = registered(net)
    assert hookmngr.name_to_module["my_module_name"] is my_module
    hookmngr.register_forward_hook(my_forward_hook, hook_fn_name="my_forward_hook")  # Until here its name is its repr.
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
    with pytest.warns(hl.HooklineWarning, match=says("so the name", "first", "other")) as said:
        manager.register_forward_hook(log.hook(), other=net[0])
    assert said[0].filename == __file__
    assert list(manager.name_to_module) == ["first", "first_1"]


def test_a_function_that_was_named_keeps_its_name_with_a_warning(net):
    manager, hook = HookManager(), Log().hook()
    manager.register_forward_hook(hook, a=net[0], hook_fn_name="one")
    with pytest.warns(hl.HooklineWarning, match=says("so the name", "one", "two")):
        manager.register_forward_hook(hook, b=net[1], hook_fn_name="two")
    manager.register_forward_hook(hook, c=net[2])
    assert list(manager.name_to_hookhandle) == ["one[a]", "one[b]", "one[c]"]


def test_a_function_is_registered_once_on_a_module_and_nothing_of_a_refused_call_stays(net):
    manager, hook = HookManager(), Log().hook()
    manager.register_forward_hook(hook, a=net[0], hook_fn_name="f")
    with pytest.raises(AssertionError, match="Hook function f was already registered with module a"):
        manager.register_forward_hook(hook, b=net[1], c=net[0])
    assert list(manager.name_to_hookhandle) == ["f[a]"]


def test_what_is_no_module_function_or_kind_is_refused(net):
    manager = HookManager()
    with pytest.raises(TypeError, match="a module is a torch.nn.Module, not int"):
        manager.register_forward_hook(print, 3)
    with pytest.raises(TypeError, match="activat is a torch.nn.Module, not bool"):
        manager.register_forward_hook(print, net[0], activat=False)
    with pytest.raises(TypeError, match="a hook is a function, not int"):
        manager.register_forward_hook(3, net[0])
    with pytest.raises(AssertionError, match="invalid hook type: zz"):
        manager.register_hook("zz", print, net[0])
    assert not manager.modules
    assert not manager.name_to_hookhandle


def test_a_container_that_is_never_called_is_registered_with_a_warning():
    manager = HookManager()
    with pytest.warns(hl.HooklineWarning, match=says("this function will never be called", "ModuleList")) as said:
        manager.register_forward_hook(Log().hook(), layers=nn.ModuleList([nn.ReLU()]), hook_fn_name="f")
    assert said[0].filename == __file__
    assert list(manager.name_to_hookhandle) == ["f[layers]"]


def test_the_forward_cache_is_for_backward_hooks(net):
    manager = HookManager()
    only = says("retain_forward_cache option is exclusively for")
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
    assert seen == ["one"] * 4  # The name of the manager that came first.
    second.cleanup()
    net(x)
    assert seen[4:] == ["one"]
    first.cleanup()
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
        with pytest.raises(KeyError):
            call()


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
