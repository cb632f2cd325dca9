"""What takes long: `make test` tries some of it, and `make fuzz` all. See also the marker `deep` in pyproject.toml."""

from __future__ import annotations

import os

IS_DEEP = bool(os.environ.get("HOOKLINE_DEEP"))
