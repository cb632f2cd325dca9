"""Hook points on every module, as TransformerLens users know them: `auto_hook`, and `check`, which tests them."""

from hookline.points.check import check
from hookline.points.hook_points import HookPoint
from hookline.points.hooked_model import HookedModel, auto_hook

__all__ = ["HookPoint", "HookedModel", "auto_hook", "check"]


def __dir__() -> list[str]:
    return sorted(__all__)
