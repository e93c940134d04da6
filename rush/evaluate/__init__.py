"""How good a model is: held-out loss, multiple choice, answers side by side; and whether a recipe can learn at all."""
