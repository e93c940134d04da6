"""Evaluation: held-out loss, win rates, multiple choice, sample answers; and whether a recipe can overfit one batch."""
