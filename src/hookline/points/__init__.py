"""Hook points on everything, as TransformerLens users know them: `auto_hook`, and `check`, which tries them out."""

from hookline.points.checks import check
from hookline.points.hooked_model import HookedModel, auto_hook
from hookline.points.point import HookPoint

__all__ = ["HookPoint", "HookedModel", "auto_hook", "check"]
