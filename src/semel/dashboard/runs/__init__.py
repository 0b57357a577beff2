"""The pages of runs: the list, one run, two runs side by side."""
