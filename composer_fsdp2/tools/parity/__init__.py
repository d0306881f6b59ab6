"""Two runs of one job, compared step by step. Pure: starts nothing and trains nothing."""
