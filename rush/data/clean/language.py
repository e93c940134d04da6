"""Language identification offline, by py3langid, whose model is in its wheel.

It is a naive Bayes classifier over byte n-grams, for 139 languages. It is nearly always right on a sentence or more, unreliable
on a few words, and confuses close languages (Norwegian and Danish, Croatian and Serbian). Only the beginning of a text is used.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from rush.data.readers import import_extra
from rush.errors import RecipeError, nearest

BEGINNING = 2000  # characters


@functools.lru_cache(maxsize=1)
def _identifier() -> Any:
    module = import_extra("py3langid.langid", "language", "Language identification")
    return module.LanguageIdentifier.from_model_file(module.MODEL_FILE, norm_probs=True)


def identify(text: str) -> tuple[str, float]:
    """The most likely language (ISO 639-1, as in `en`) and its probability."""
    language, confidence = _identifier().classify(text[:BEGINNING])
    return str(language), float(confidence)


def check_languages(languages: Sequence[str]) -> None:
    """Refuse unknown language codes; MachineError if the extra is not installed."""
    known = _identifier().labels
    for language in languages:
        if language not in known:
            raise RecipeError(f"languages: {language!r} is not a language code; {nearest(language, known)}")
