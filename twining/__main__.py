"""`python -m twining` is the `twining` command."""

from twining.cli import main

if __name__ == "__main__":
    main()
