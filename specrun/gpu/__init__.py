"""The path on GPUs: engines, caches, drafters and the round, which the CPU path does not need."""
