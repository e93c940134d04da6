"""`rush tune`: find the fastest recipe for this machine that still learns the same, and prove it.

    moves      the changes of a recipe: declared settings of techniques, the micro batch
    outlook    the expected gain of a move (forecast: the planner; earlier: gains measured here before)
    options    which move is tried next
    search     from the unchanged recipe, move by move, to the lead; finals: the winner
    lengths    the search for the longest sequence
    trials     the trials, on the lab's bench; budget: their time
    tuning     a search in a folder; record: its record

See docs/tune.md.
"""
