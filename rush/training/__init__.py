"""Training: build a run from a recipe, step it, record it, save it, resume it."""
