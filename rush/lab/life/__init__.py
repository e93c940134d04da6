"""A life: a recipe taken through a whole run, from the first step to the exported model."""
