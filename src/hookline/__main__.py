"""`python -m hookline` is the command line."""

from hookline._cli.main import main

if __name__ == "__main__":
    main()
