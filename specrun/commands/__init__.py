"""One module for each command: options in, one library call, results out."""
