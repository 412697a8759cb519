"""`python -m headrace` is `headrace`."""

from headrace.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
