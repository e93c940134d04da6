"""`python -m rush`: the command line, straight from a checkout."""

from rush.cli import main

if __name__ == "__main__":
    main()
