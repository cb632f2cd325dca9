"""The committed page is the one that its sources build."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "explorer"
OWN = ("build.mjs", "index.html", "package-lock.json", "package.json", "style.css", "tsconfig.json")


@pytest.fixture(scope="module")
def page() -> str:
    return files("hookline._explore").joinpath("explorer.html").read_text(encoding="utf-8")


def hash_of_sources() -> str:
    """Return the hash of the page's sources, as explorer/build.mjs computes it."""
    names = sorted([*OWN, *(f"src/{path.name}" for path in (SOURCES / "src").iterdir())])
    found = hashlib.sha256()
    for name in names:
        found.update(name.encode() + b"\0" + (SOURCES / name).read_bytes() + b"\0")
    return found.hexdigest()


def test_the_built_page_is_of_the_sources_as_they_are(page):
    built = re.search(r'name="hookline-sources" content="(\w+)"', page)
    assert built is not None
    assert built.group(1) == hash_of_sources(), "explorer/ has changed since the page was built: run `make page`"


def test_the_page_has_one_place_for_data_and_may_fetch_nothing(page):
    assert page.count("/*HOOKLINE-DATA*/") == 1
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page).group(1)
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    written = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert all(address.startswith("data:") for address in re.findall(r'(?:src|href)="([^"]*)', written))


def test_the_policy_lets_the_own_script_and_style_through_and_no_other(page):
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, flags=re.DOTALL)
        found = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{found}'" in page


def test_names_go_into_the_page_as_text_only():
    for path in (SOURCES / "src").glob("*.ts"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", path.read_text("utf-8")
        ), path


def test_no_source_file_is_too_long_to_read():
    lengths = {path.name: len(path.read_text("utf-8").splitlines()) for path in (SOURCES / "src").iterdir()}
    assert {name: lines for name, lines in lengths.items() if lines > 300} == {}


def test_the_lock_file_names_no_address():
    assert '"resolved"' not in (SOURCES / "package-lock.json").read_text("utf-8")


@pytest.mark.process
@pytest.mark.skipif(
    not shutil.which("node") or not (SOURCES / "node_modules" / "esbuild").exists(),
    reason="needs Node and explorer/node_modules, which `make page` installs",
)
def test_building_again_gives_the_same_bytes(page, tmp_path):
    subprocess.run([SOURCES / "node_modules" / ".bin" / "tsc", "--noEmit"], cwd=SOURCES, check=True)
    subprocess.run(["node", "build.mjs", tmp_path / "page.html"], cwd=SOURCES, check=True)
    assert (tmp_path / "page.html").read_text("utf-8") == page
