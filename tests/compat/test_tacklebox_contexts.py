"""tacklebox: contexts, removal, and hook functions and handles without a manager."""

from __future__ import annotations

import contextlib
import gc
import inspect
import weakref

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.compat.tacklebox.hook_management import (
    HookFunction,
    HookHandle,
    HookManager,
)
from tests.errors.wording import says
from tests.support.compat_models import Log, my_backward_hook, my_forward_hook, my_forward_pre_hook, registered
from tests.support.quick_python import run_forked

# Most managers here are dropped before a forward runs. Another test checks the warning about it.
pytestmark = pytest.mark.filterwarnings("ignore:a HookManager is dropped:hookline.HooklineWarning")


# Contexts


def test_a_context_restores_what_was_before(net):
    manager = registered(net, activate=False)
    manager.activate_module_hooks(net[0])
    handles = manager.name_to_hookhandle.values()
    before = [handle.active for handle in handles]
    context = manager.hook_all_context()
    assert [handle.active for handle in handles] == before  # Creating a context changes nothing.
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
    with pytest.raises(AssertionError, match=says("context object is missing or", "3", "__enter__", "__exit__")):
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
    with pytest.warns(hl.HooklineWarning, match=says("and can't be activated")):
        handle.activate()
    assert not handle.active
    manager.remove_hook_function(my_forward_hook)
    assert my_forward_hook not in manager.function_to_hookfn
    assert {one.function for one in manager.hook_fns} == {my_forward_pre_hook, my_backward_hook}
    manager.remove_module(net[0])
    assert list(manager.name_to_module) == ["other_module_name", "third"]
    assert net[0] not in manager.modules
    assert my_backward_hook in manager.function_to_hookfn  # It keeps its name if it is registered again.
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


@pytest.mark.process
def test_a_manager_that_lives_to_the_end_of_the_program_goes_quietly():
    code = """
from torch import nn
from hookline.compat.tacklebox.hook_management import HookManager
model = nn.Sequential(nn.Linear(2, 2))
manager = HookManager()
manager.register_forward_hook(print, *model)
nn.manager = manager  # So that it is among the last to go.
"""
    done = run_forked(code, strict=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class Probe:
    """An object that holds a manager, whose hooks are methods of the object."""

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
        gc.collect()  # Warnings are errors here, including those about a __del__ that raises.
        assert gone() is None
    finally:
        gc.enable()


# HookFunction and HookHandle without a manager


def test_a_hook_function_works_without_a_manager(x):
    module, log = nn.ReLU(), Log()
    hook_fn = HookFunction(log.hook("f"), "forward_hook", name="f")
    with pytest.raises(AssertionError, match=says("Module must be given name")):
        hook_fn.register(module)
    module.name = "relu"
    (handle,) = hook_fn.register(module)
    assert repr(handle) == f"<f[relu] {HookHandle} registered to relu (active)>"
    with pytest.raises(AssertionError, match="Hook function f was already registered with module relu"):
        hook_fn.register(module)
    output = module(x)
    assert log.seen[0][2] == (output,)
    hook_fn.deactivate_all_handles()
    module(x)
    assert repr(handle).endswith("(inactive)>")
    with pytest.raises(AssertionError, match=says("Cannot deactivate hook")):
        handle.deactivate(raise_on_inactive=True)
    handle.activate()
    with pytest.raises(AssertionError, match=says("Cannot activate hook")):
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


def test_hook_functions_and_handles_from_elsewhere_are_taken_in(x):
    manager, module, log = HookManager(), nn.ReLU(), Log()
    module.name = "relu"
    hook_fn = HookFunction(log.hook("f"), "forward_hook", name="f")
    handles = hook_fn.register(module, activate=False)
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
    with pytest.raises(TypeError, match="is called with .module, inputs."):
        HookFunction(print, "forward_pre_hook", name="n")(*given)
    with pytest.raises(TypeError, match="zz"):
        HookFunction(lambda zz: zz, "forward_hook", name="n", pass_by_pos=False)(*given)
    assert HookFunction.HOOK_TYPES == ["forward_hook", "backward_hook", "forward_pre_hook"]


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
        "__init__": "",
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


def written(method) -> str:
    """Return the parameters of a method as in its source, without self and types."""
    _, *parameters = inspect.signature(method).parameters.values()
    return ", ".join(str(one.replace(annotation=one.empty)) for one in parameters)
