"""Tables: as text that fits the terminal, in colours, and as HTML for a notebook. Does not import torch."""

from hookline._tables.table import Table, Tabular, count, size, table_of
from hookline._tables.terminal import is_terminal, terminal_width

__all__ = ["Table", "Tabular", "count", "is_terminal", "size", "table_of", "terminal_width"]
