"""Questions about the behaviour of a capture, asked of every peer in the same way. Each answer is measured."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import by_torch
import by_us
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from tasks import Job, Peer


class Chain(nn.Sequential):
    """A Sequential with its own forward, because dynamo skips torch's. It has the attributes that pyvene reads."""

    config = SimpleNamespace(hidden_size=16)
    device = torch.device("cpu")

    def forward(self, input: Tensor) -> Tensor:
        for module in self:
            input = module(input)
        return input


class Broken(nn.Module):
    """Raises when it is called."""

    def forward(self, value: Tensor) -> Tensor:
        raise ZeroDivisionError("on purpose")


def pair(*after: nn.Module) -> Chain:
    """Return a linear layer followed by the modules `after`."""
    torch.manual_seed(0)
    return Chain(nn.Linear(16, 16), *after).eval()


def state(model: nn.Module) -> list[Any]:
    """Return everything on a model that hooking could change."""
    found: list[Any] = []
    for name, module in model.named_modules(remove_duplicate=False):
        for attribute, value in vars(module).items():
            found.append((name, attribute, held(value)))
    return found + [parameter.requires_grad for parameter in model.parameters()]


def held(value: Any) -> Any:
    """Return the value of an attribute in a form that can be compared later: a container by its items."""
    if isinstance(value, dict):
        return [(key, id(item)) for key, item in value.items()]
    if isinstance(value, list | tuple | set):
        return [id(item) for item in value]
    return value if isinstance(value, bool | int | str) else id(value)


def answers(peer: Peer, skip: Sequence[str] = ()) -> dict[str, str]:
    """Return the answers of a peer by question."""
    bare_seconds()
    before = bare_seconds()
    asked = {name: question for name, question in ASKED.items() if name not in skip}
    theirs = {name: said(question, peer.tasks["one"], peer.adopt) for name, question in asked.items()}
    after = bare_seconds()
    theirs["bare after"] = f"{after / before:.2f}"
    return theirs


def yardsticks(skip: Sequence[str] = ()) -> dict[str, dict[str, str]]:
    """Return the answers of torch's hooks and of hookline."""
    makers = {"raw torch hooks": by_torch.TASKS["one"], "hookline": by_us.TASKS["one"]}
    asked = {name: question for name, question in ASKED.items() if name not in skip}
    return {
        by: {name: said(question, maker, lambda model: model) for name, question in asked.items()}
        for by, maker in makers.items()
    }


def said(question: Callable[..., str], maker: Any, adopt: Callable[[nn.Module], Any]) -> str:
    """Ask a question, and turn an error into an answer."""
    try:
        with torch.no_grad():
            return question(maker, adopt)
    except Exception as error:
        return f"raises {type(error).__name__}: {str(error).strip().splitlines()[0][:90] if str(error) else ''}"


def job_on(model: Any) -> Job:
    """Return the task of capturing the first module."""
    from tasks import Job

    torch.manual_seed(1)
    return Job(model, torch.randn(1, 16), "input", nn.Linear, ["0"], "0", torch.ones(1))


def kept(result: Any) -> Any:
    """Return the captured values by name."""
    return result() if callable(result) else result


def in_place(maker: Any, adopt: Callable[[nn.Module], Any]) -> str:
    model = pair(nn.ReLU(inplace=True))
    job = job_on(adopt(model))
    right = model[0](job.inputs)
    found = kept(maker(job)())["0"]
    return "yes" if torch.equal(found.detach(), right) else "no"


def compiled(maker: Any, adopt: Callable[[nn.Module], Any]) -> str:
    torch.compiler.reset()
    model = pair(nn.ReLU())
    right = model[0](job_on(model).inputs)
    adopted = adopt(model)
    owner = adopted if isinstance(adopted, nn.Module) else model
    graphs: list[str] = []

    def backend(graph: Any, _inputs: object) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            graphs.append("ran")
            return graph.forward(*args)

        return run

    owner.compile(backend=backend)
    job = job_on(adopted)
    owner(job.inputs)
    assert graphs, "the model was not compiled"
    graphs.clear()
    found = kept(maker(job)()).get("0")
    if found is None or not torch.equal(found.detach(), right):
        return "no"
    return "yes" if graphs else "yes, but the model runs uncompiled"


def as_found(maker: Any, adopt: Callable[[nn.Module], Any]) -> str:
    return left_behind(pair(nn.ReLU()), maker, adopt)


def as_found_after_an_error(maker: Any, adopt: Callable[[nn.Module], Any]) -> str:
    return left_behind(pair(Broken()), maker, adopt)


def left_behind(model: nn.Module, maker: Any, adopt: Callable[[nn.Module], Any]) -> str:
    """Capture, even if that raises, and compare the state of the model with its state before."""
    before = state(model)
    adopted = adopt(model)
    if isinstance(adopted, nn.Module) and adopted is not model:
        model, before = adopted, state(adopted)  # The peer made its own model.
    run = maker(job_on(adopted))
    try:
        run()
    except Exception as error:
        if "on purpose" not in str(error):
            raise
    del run, adopted
    gc.collect()
    return "yes" if state(model) == before else f"no: {difference(before, state(model))}"


def difference(before: list[Any], after: list[Any]) -> str:
    """Name the attributes that differ."""
    known, found = {item[:2]: item for item in before if isinstance(item, tuple)}, {}
    for item in after:
        if isinstance(item, tuple):
            found[item[:2]] = item
    names = {key[1] for key in known.keys() | found.keys() if known.get(key) != found.get(key)}
    if [item for item in before if isinstance(item, bool)] != [item for item in after if isinstance(item, bool)]:
        names.add("requires_grad")
    return ", ".join(sorted(names)) or "the order of attributes"


def others(maker: Any, adopt: Callable[[nn.Module], Any]) -> str:
    model, fired = pair(nn.ReLU()), []
    model[0].register_forward_hook(lambda *_: fired.append("before"))
    adopted = adopt(model)
    owner = adopted if isinstance(adopted, nn.Module) else model
    job = job_on(adopted)
    maker(job)()
    during = bool(fired)
    fired.clear()
    owner(job.inputs)
    return "yes" if during and fired else f"{'during' if during else 'not during'}, {'after' if fired else 'not after'}"


def bare_seconds(times: int = 400) -> float:
    """Return the seconds of a forward of an untouched model, from the fastest runs."""
    model, inputs = nn.Sequential(*[nn.Linear(16, 16) for _ in range(50)]).eval(), torch.randn(1, 16)
    taken = []
    with torch.no_grad():
        for _ in range(times):
            start = time.process_time()
            model(inputs)
            taken.append(time.process_time() - start)
    return sorted(taken)[times // 20]


ASKED = {
    "in place": in_place,
    "compiled": compiled,
    "as found": as_found,
    "as found, error": as_found_after_an_error,
    "others": others,
}
