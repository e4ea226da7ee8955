"""``python -m specrun``: the same as ``specrun``."""

from specrun.cli import main

if __name__ == "__main__":
    main(prog_name="specrun")
