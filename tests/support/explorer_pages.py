"""Read a page back as its front end does; and a small model to write pages about."""

from __future__ import annotations

import base64
import json
import os
import struct
from html.parser import HTMLParser
from typing import Any

import torch
from torch import Tensor, nn


class Scripts(HTMLParser):
    """An HTML parser that collects what a browser would treat as scripts."""

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


def size_without_data(path: str | os.PathLike[str]) -> int:
    """Return how many bytes a page has besides its data."""
    scripts = Scripts()
    scripts.feed(text_of(path))
    (data,) = [text for attrs, text in scripts.found if attrs.get("id") == "hookline-data"]
    return os.path.getsize(path) - len(data.encode())


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


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.attn(x, x, x, average_attn_weights=False)[0]
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.h = nn.ModuleList(Block(8) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 20)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.h:
            x = block(x)
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))


def loss(logits):
    return logits.logsumexp(-1).mean()
