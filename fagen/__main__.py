"""``python -m fagen``: the command line."""

from fagen.cli import main

if __name__ == "__main__":
    main()
