"""`python -m hookline` is the command line."""

from hookline.cli import main

if __name__ == "__main__":
    main()
