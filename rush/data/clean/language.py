"""Which language a text is in, without network: py3langid, whose model travels in its wheel.

It is a naive Bayes classifier over runs of bytes, for 139 languages. On a sentence or more it is right nearly
always; on a few words it guesses, and tells close languages (Norwegian and Danish, Croatian and Serbian)
badly. Only the beginning of a text is looked at: the rest would cost time and rarely change the answer.
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
    module = import_extra("py3langid.langid", "language", "Telling languages apart")
    return module.LanguageIdentifier.from_model_file(module.MODEL_FILE, norm_probs=True)


def identify(text: str) -> tuple[str, float]:
    """The likeliest language (ISO 639-1, as in `en`) and how likely it is among all that are known."""
    language, confidence = _identifier().classify(text[:BEGINNING])
    return str(language), float(confidence)


def check_languages(languages: Sequence[str]) -> None:
    """Refuse codes the identifier does not know, and say which extra is missing, before anything runs."""
    known = _identifier().labels
    for language in languages:
        if language not in known:
            raise RecipeError(f"languages: {language!r} is not a language code; {nearest(language, known)}")
