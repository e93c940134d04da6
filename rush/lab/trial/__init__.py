"""One trial: a recipe in a fresh process, timed, with a limit, whatever becomes of it."""
