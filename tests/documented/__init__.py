"""Runs the commands that README and docs show, as typed, in an empty folder of a fresh environment without network.

python -m tests.documented README.md docs/watch.md      # some pages, with every line of output
"""
