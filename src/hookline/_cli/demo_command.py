"""`hookline demo`: the worked example."""

from __future__ import annotations

import inspect
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hookline as hl
from hookline._cli.options import EPOCHS, PAGE
from hookline._progress import track
from hookline._tables import Table, count

BAR_WIDTH = 30
RULE_WIDTH = 80


class ResidualBlock(nn.Module):
    """A residual block: the output of its convolution is added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)  # Overwrites the output of `norm`, but not its captured value.
        self.conv = nn.Conv2d(width, width, kernel_size=3, padding=1)

    def forward(self, value: Tensor) -> Tensor:
        added: Tensor = self.conv(self.relu(self.norm(value)))
        return value + added


class DigitNet(nn.Module):
    """A net from images of 8 × 8 to ten logits: a stem, four residual blocks `h.0` to `h.3`, a head."""

    def __init__(self, width: int = 24, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, kernel_size=3, padding=1)
        self.h = nn.Sequential(*(ResidualBlock(width) for _ in range(depth)))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.h(self.stem(images)).amax(dim=(2, 3)))
        return logits


@dataclass(frozen=True)
class Digits:
    """scikit-learn's 1,797 handwritten digits, a quarter of them held out for testing."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def digits() -> Digits:
    """Read the digits that come with scikit-learn; nothing is downloaded."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError:
        raise hl.HooklineError("the demo needs scikit-learn: pip install 'hookline[demo]'") from None
    pixels, labels = load_digits(return_X_y=True)
    parts = train_test_split(pixels.reshape(-1, 1, 8, 8) / 16, labels, test_size=0.25, random_state=0, stratify=labels)
    train_pixels, test_pixels, train_labels, test_labels = map(torch.from_numpy, parts)
    return Digits(train_pixels.float(), train_labels, test_pixels.float(), test_labels)


def trained(data: Digits, epochs: int = EPOCHS) -> DigitNet:
    """Return a net trained for `epochs` epochs. It is always the same, whatever the global seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = DigitNet()
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
        for _ in track(range(epochs), "training"):
            for batch in torch.randperm(len(data.images)).split(64):
                optimizer.zero_grad()
                F.cross_entropy(model(data.images[batch]), data.labels[batch]).backward()
                optimizer.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, data: Digits) -> float:
    """Return the share of test digits that the model classifies correctly."""
    right = model(data.test_images).argmax(dim=1) == data.test_labels
    return float(right.float().mean())


def see(model: nn.Module, data: Digits) -> hl.Cache:
    """Capture the output of each layer, and the input of the in-place ReLU in each block."""
    with hl.capture(model, "stem", "h.*", "h.*.relu:input", "head") as acts:
        model(data.test_images)
    return acts


def zero_each_layer(model: nn.Module, data: Digits) -> Mapping[str, float]:
    """Return the accuracy with each layer's output set to zero in turn."""
    return hl.sweep(model, ["stem", "h.*.conv", "head"], lambda: accuracy(model, data), patch=0.0)


def follow_gradients(model: nn.Module, data: Digits) -> hl.Cache:
    """Capture the gradient of the loss at the output of each layer."""
    with hl.capture(model, "stem:grad_output", "h.*:grad_output", "head:grad_output") as grads:
        F.cross_entropy(model(data.test_images), data.test_labels).backward()
    return grads


def stop_early(model: nn.Module, data: Digits) -> tuple[hl.Cache, list[str]]:
    """Capture `h.0` and compute nothing after it. A second set of hooks lists the modules that ran."""
    ran: list[str] = []
    watch = hl.Hooks(model)
    watch.edit("**", lambda value, call: ran.append(call.site.path), with_call=True)
    _, acts = hl.run(model, data.test_images, capture="h.0", stop=True)
    watch.remove()
    return acts, ran


def keep(acts: hl.Cache, path: Path) -> hl.Cache:
    """Write a cache to a safetensors file and read it back."""
    acts.save(path)
    return hl.Cache.load(path)


def browse(model: nn.Module, data: Digits, left: Mapping[str, float], to: Path) -> os.PathLike[str]:
    """Write a page with all values and gradients, next to a run in which the most important block is zeroed."""
    worst = min(hl.sites(model, "h.*.conv"), key=lambda site: left[str(site)])
    with hl.patch(model, {worst: 0.0}), hl.capture(model, "**", "stem:grad_output", "h.*:grad_output") as zeroed:
        F.cross_entropy(model(data.test_images), data.test_labels).backward()
    return hl.explore(
        model,
        to=to,
        run=(data.test_images,),
        against=zeroed,
        loss=lambda logits: F.cross_entropy(logits, data.test_labels),
        names=["as it is", f"{worst} zeroed"],
        measured={"accuracy with one layer zeroed": left},
        title="A net that reads digits",
        most="4 MB",
    )


def main(epochs: int = EPOCHS, to: str | os.PathLike[str] = PAGE) -> None:
    """Run every step, and show its code and its result; the last step writes a page to browse."""
    started = time.perf_counter()
    data = digits()
    model = trained(data, epochs)
    whole = accuracy(model, data)
    print(f"A net was trained on {len(data.images):,} digits for {count(epochs, 'epoch')}; test accuracy {whole:.1%}.")
    acts = see(model, data)
    show("See the values", see, see_report(acts))
    left = zero_each_layer(model, data)
    show("Zero each layer in turn", zero_each_layer, accuracy_table(left, whole))
    show("Follow gradients", follow_gradients, gradient_table(follow_gradients(model, data)))
    show("Stop early", stop_early, stop_report(model, data, acts))
    show("Keep it on disk", keep, keep_report(acts))
    page = browse(model, data, left, Path(to))
    show("Browse it all", browse, f"Open {Path(page).resolve().as_uri()} in a browser.")
    print(f"\nAll of this took {time.perf_counter() - started:.0f} s.")


def show(title: str, step: Callable[..., object], result: str) -> None:
    """Print the source code of a step, which is the code that ran, and its result."""
    print(f"\n── {title} {'─' * (RULE_WIDTH - len(title))}\n\n{inspect.getsource(step)}\n{result}")


def see_report(acts: hl.Cache) -> str:
    """Return tables of the captured values, and show that an in-place ReLU did not overwrite them."""
    lowest = min(float(value.min()) for value in acts.select("h.*.relu:input").values())
    return (
        f"{acts}\n\n{acts.stats()}\n\n"
        f"The ReLUs have overwritten their inputs with numbers ≥ 0; the captured inputs go down to {lowest:.1f}."
    )


def accuracy_table(left: Mapping[str, float], whole: float) -> str:
    """Return a table of how far accuracy falls without each layer."""
    rows = [("(nothing)", f"{100 * whole:.1f}", "", bar(whole))]
    rows += [(site, f"{100 * share:.1f}", f"{100 * (share - whole):+.1f}", bar(share)) for site, share in left.items()]
    return str(Table(["zeroed", "accuracy %", "change", ""], rows))


def gradient_table(grads: hl.Cache) -> str:
    """Return a table of the gradient norm at each site, by depth. (The last layer's gradient was captured first.)"""
    norms = {site: float(grads[site].norm()) for site in reversed(list(grads))}
    most = max(norms.values())
    rows = [(site, f"{norm:.2e}", bar(norm / most)) for site, norm in norms.items()]
    return str(Table(["site", "norm", ""], rows))


def stop_report(model: nn.Module, data: Digits, acts: hl.Cache) -> str:
    """Say which modules ran before the stop, whether the value is the same, and how long it took."""
    stopped, ran = stop_early(model, data)
    same = "the same" if torch.equal(stopped["h.0"], acts["h.0"]) else "ANOTHER"
    modules = sum(1 for _ in model.modules())
    return (
        f"{len(ran)} of {modules} modules ran to their end: {', '.join(ran)}.\n"
        f"The value is {same}, and it took {time_ratio(model, data):.2f} of the time of a whole forward."
    )


def keep_report(acts: hl.Cache) -> str:
    """Say whether a cache that is read back from disk is equal."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits.safetensors"
        again = keep(acts, path)
        size = path.stat().st_size
    same = list(again) == list(acts) and all(torch.equal(again[site], acts[site]) for site in acts)
    return f"{count(len(again), 'site')} in {size / 2**20:.1f} MiB, read back {'equal' if same else 'CHANGED'}."


def bar(share: float) -> str:
    """Return a share between 0 and 1 as a bar of text."""
    return "█" * round(BAR_WIDTH * share)


def time_ratio(model: nn.Module, data: Digits, repeats: int = 15) -> float:
    """Return the time of a forward that stops after `h.0` divided by that of a whole one (medians, interleaved)."""
    whole, stopped = [], []
    with torch.no_grad():
        for _ in range(repeats):
            whole.append(seconds(lambda: model(data.test_images)))
            stopped.append(seconds(lambda: hl.run(model, data.test_images, capture="h.0", stop=True)))
    return statistics.median(stopped) / statistics.median(whole)


def seconds(work: Callable[[], object]) -> float:
    """Return how long `work` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    try:
        main()
    except hl.HooklineError as error:
        sys.exit(f"hookline: {error}")
