"""``python -m specbuild``: the same as ``specbuild``."""

from specbuild.cli import main

if __name__ == "__main__":
    main(prog_name="specbuild")
