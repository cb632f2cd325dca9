"""Reading a page back, as its front end does."""

from __future__ import annotations

import base64
import json
import os
import struct
from html.parser import HTMLParser
from typing import Any

import torch
from torch import Tensor


class Scripts(HTMLParser):
    """Collects what a browser would take for scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[dict[str, str | None], str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "script":
            self.found.append((dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script" and self.found:
            attrs, text = self.found[-1]
            self.found[-1] = attrs, text + data


def text_of(path: str | os.PathLike[str]) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def data_of(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the data of a page."""
    scripts = Scripts()
    scripts.feed(text_of(path))
    (text,) = [text for attrs, text in scripts.found if attrs.get("id") == "hookline-data"]
    return json.loads(text)


def site_of(page: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [site for site in page["sites"] if site["name"] == name]
    return found


def module_of(page: dict[str, Any], path: str) -> dict[str, Any]:
    (found,) = [module for module in page["modules"] if module["path"] == path]
    return found


def pixels(picture: dict[str, Any]) -> Tensor:
    """Return the numbers that a picture shows."""
    packed = base64.b64decode(picture["levels"])
    levels = struct.unpack(f"<{len(packed) // 4}f", packed)
    table = [*levels, *[0.0] * (253 - len(levels)), float("-inf"), float("inf"), float("nan")]
    codes = base64.b64decode(picture["codes"])
    return torch.tensor([table[code] for code in codes], dtype=torch.float64).reshape(picture["shape"])


def shown(value: Tensor, picture: dict[str, Any]) -> Tensor:
    """Return the part of a value that a picture says it shows."""
    value = value.reshape(picture["of"])
    for dimension, (start, count, step) in enumerate(picture["pick"]):
        value = value.index_select(dimension, torch.arange(count) * step + start)
    return value
