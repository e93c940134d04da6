"""`rush tune`: find the fastest recipe for this machine that still learns the same, and prove it.

    moves      what may be changed: settings that techniques declare, the micro batch
    outlook    what is expected of a change (forecast: the planner; earlier: findings on this machine)
    options    which of them is tried next
    search     from the recipe as it stands, by the likeliest change, to the lead; finals: who wins
    lengths    the other search, for the longest sequence
    trials     the trials, on the lab's bench; budget: their time
    tuning     all of it in a folder; record: what is written down

See docs/tune.md.
"""
