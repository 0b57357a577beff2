"""The pages of runs: the list, one run, and two runs compared."""
