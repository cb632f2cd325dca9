"""Install each peer in its own environment, run the same tasks in each, and write one table.

python benchmarks/peers/run.py                 everything; existing environments are reused
python benchmarks/peers/run.py nnsight Captum  only these peers; the others keep their last results
python benchmarks/peers/run.py --install       only the environments
python benchmarks/peers/run.py --table         only the table, from the last results
python benchmarks/peers/run.py --only sweep    only a sweep over layers and positions, into sweep.txt
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENTS = HERE / ".venvs"
CONSTRAINTS = ROOT / "constraints.txt"
LONGEST = 900  # The time limit for one peer in seconds.
LONGEST_SWEEP = 3600
PIP = ("-m", "pip", "install", "--disable-pip-version-check", "--quiet")


@dataclass(frozen=True)
class Source:
    """The packages of a peer, and the script that runs it."""

    name: str
    script: str
    requirements: tuple[str, ...]
    sweeps: bool = False  # Whether it has a way to sweep.

    @property
    def folder(self) -> Path:
        """The folder of its environment."""
        return ENVIRONMENTS / (self.requirements[0].split("==")[0] if self.requirements else "by-hand")

    @property
    def python(self) -> Path:
        """The interpreter of its environment."""
        return self.folder / "bin" / "python"

    @property
    def result(self) -> Path:
        """The file with the result of its last run."""
        return self.folder / "result.json"

    @property
    def swept(self) -> Path:
        """The file with the result of its last sweep."""
        return self.folder / "sweep.json"


SOURCES = [
    Source("nnsight", "with_nnsight.py", ("nnsight==0.8.1",), sweeps=True),
    Source("TransformerLens", "with_transformer_lens.py", ("transformer-lens==4.3.0",), sweeps=True),
    Source("pyvene", "with_pyvene.py", ("pyvene==0.1.8",)),
    Source("torchlens", "with_torchlens.py", ("torchlens==2.36.1",)),
    Source("Captum", "with_captum.py", ("captum==0.9.0",)),
    Source("tdhook", "with_tdhook.py", ("tdhook==0.3.0",)),
    Source("TorchHook", "with_torchhook.py", ("torchhook==0.2.7",)),
    Source("tacklebox", "with_tacklebox.py", ("tacklebox==1.0.3",)),
    Source("baukit-style, by hand", "with_hooks_by_hand.py", ()),
]


def install(source: Source) -> str:
    """Create the environment if it does not exist. Return the reason if that failed, else ""."""
    stamp = source.folder / ".installed"
    if stamp.exists() and stamp.read_text() == stamp_of(source):
        return ""
    print(f"installing {source.name} into {source.folder.relative_to(ROOT)}", flush=True)
    if not source.python.exists():
        subprocess.run([sys.executable, "-m", "venv", source.folder], check=True)
    torch = next(line.strip() for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
    wanted = [torch, "transformers", "safetensors", *source.requirements]
    for arguments in (["-c", CONSTRAINTS, *wanted], ["-c", CONSTRAINTS, "--no-deps", "-e", ROOT]):
        done = subprocess.run([source.python, *PIP, *arguments], capture_output=True, text=True)
        if done.returncode:
            return last_line(done.stderr)
    found = subprocess.run(
        [source.python, "-c", "import importlib.metadata; print(importlib.metadata.version('torch'))"],
        capture_output=True,
        text=True,
    ).stdout.strip()
    if found.split("+")[0] != torch.removeprefix("torch=="):
        return f"installed torch {found} instead of {torch}"
    stamp.write_text(stamp_of(source))
    return ""


def stamp_of(source: Source) -> str:
    """Return the packages of an environment as text."""
    torch = next(line.strip() for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
    return " ".join([torch, *source.requirements])


def last_line(text: str) -> str:
    """Return the last line that is not empty and not a warning."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("WARNING")]
    return lines[-1][:160] if lines else "no error message"


def measured(source: Source, extent: str, sweeps: bool = False) -> dict[str, Any]:
    """Run one peer in its environment: its tasks, or its sweep. A failure also gives a result."""
    began = time.perf_counter()
    into, longest = (source.swept, LONGEST_SWEEP) if sweeps else (source.result, LONGEST)
    command = [source.python, HERE / source.script, "--json", into, extent, *(["--only", "sweep"] if sweeps else [])]
    into.unlink(missing_ok=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=longest)
    except subprocess.TimeoutExpired:
        return failed(source, f"took more than {longest} s")
    if done.returncode:
        return failed(source, last_line(done.stderr))
    print(f"{source.name}: {time.perf_counter() - began:.0f} s", flush=True)
    result = {**json.loads(into.read_text()), "revision": revision()}
    into.write_text(json.dumps(result, indent=1))
    return result


def revision() -> str:
    """Return the last commit that changed the library, and whether there are uncommitted changes."""
    commit = subprocess.run(["git", "log", "-1", "--format=%h", "--", "src"], cwd=ROOT, capture_output=True, text=True)
    changed = subprocess.run(["git", "status", "--short", "src"], cwd=ROOT, capture_output=True, text=True)
    return (commit.stdout.strip() or "no commit") + (" with changes" if changed.stdout.strip() else "")


def failed(source: Source, reason: str) -> dict[str, Any]:
    """Return the result of a peer that failed."""
    print(f"{source.name}: {reason}", flush=True)
    version = source.requirements[0].split("==")[1] if source.requirements else ""
    return {"peer": source.name, "version": version, "failed": reason, "note": "", "cells": {}, "answers": {}}


def kept(source: Source, sweeps: bool = False) -> dict[str, Any] | None:
    """Return the result of the last run of a peer."""
    path = source.swept if sweeps else source.result
    return json.loads(path.read_text()) if path.exists() else None


def main() -> None:
    """Install the peers, run them, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", help="the peers to run; all by default")
    parser.add_argument("--install", action="store_true", help="create the environments and run nothing")
    parser.add_argument("--table", action="store_true", help="run nothing and write the table from the last results")
    parser.add_argument("--seconds", type=float, default=2.0, help="approximate time for each task of each peer")
    parser.add_argument("--quick", action="store_true", help="tiny models; writes no table")
    parser.add_argument("--only", choices=["sweep"], help="run only this, with the peers that can")
    options = parser.parse_args()
    unknown = set(options.peers) - {source.name for source in SOURCES}
    if unknown:
        parser.error(f"no peer {', '.join(sorted(unknown))}; there are {', '.join(source.name for source in SOURCES)}")
    results, sweeps = [], options.only == "sweep"
    for source in SOURCES:
        if sweeps and not source.sweeps:
            continue
        if options.table or (options.peers and source.name not in options.peers):
            results.append(kept(source, sweeps) or failed(source, "not run"))
            continue
        reason = install(source)
        if reason:
            results.append(failed(source, f"could not be installed: {reason}"))
        elif not options.install:
            results.append(measured(source, "--quick" if options.quick else f"--seconds={options.seconds}", sweeps))
    if not options.install:
        from table import sweeps_of, text_of

        text = sweeps_of(results) if sweeps else text_of(results)
        print(text)
        if not options.quick:
            (HERE / ("sweep.txt" if sweeps else "table.txt")).write_text(text)


if __name__ == "__main__":
    main()
