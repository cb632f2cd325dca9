"""Models that run on several ranks: which ranks hold one model, and how they agree.

The functions that a loop over a dataset needs are public: `replica`, `meet`, `agree`, `whole`, `cut`, `placement` and
`arrived`.
"""

from hookline.parallel.gather import Gathering, agree, arrived, cut, placement, whole
from hookline.parallel.ranks import Replica, meet, replica

__all__ = ["Gathering", "Replica", "agree", "arrived", "cut", "meet", "placement", "replica", "whole"]


def __dir__() -> list[str]:
    return sorted(__all__)
