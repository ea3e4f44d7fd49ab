"""`python -m stoker.router`: the same as `stoker-router`."""

from stoker.router.app import main

if __name__ == "__main__":
    main()
