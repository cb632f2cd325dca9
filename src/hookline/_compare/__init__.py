"""Where two models part: see `compare.py`."""
