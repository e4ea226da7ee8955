"""The format of engine directories, which specbuild writes and specrun reads."""
