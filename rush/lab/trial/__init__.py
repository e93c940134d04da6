"""One trial: a recipe timed in a fresh process with a time limit."""
