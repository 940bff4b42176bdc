"""Frozen base models, all seen through one frame. A new base is one file and one line here."""

from adjust_dlm.bases import adapted, antiberty, checkpoint, exact  # noqa: F401  (fills the registry)
from adjust_dlm.bases.base import Base, BaseSpec, Partner, cut_at_end, known_bases, load_base, register_base

__all__ = ["Base", "BaseSpec", "Partner", "cut_at_end", "known_bases", "load_base", "register_base"]
