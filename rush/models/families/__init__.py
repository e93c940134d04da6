"""Model families as data, one file each: every module here that defines `FAMILY`.

`FAMILIES` has them by name (Hugging Face's model_type), `MODEL_TYPES` also by the other model_types that they read.
docs/families.md shows how to add one.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from rush.models.families.family import Family, Structure

_MODULES = [import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__)]
FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (getattr(module, "FAMILY", None) for module in _MODULES)
    if isinstance(family, Family)
}
MODEL_TYPES: dict[str, Family] = {
    name: family for family in FAMILIES.values() for name in (family.name, *family.also)
}

__all__ = ["FAMILIES", "MODEL_TYPES", "Family", "Structure"]
