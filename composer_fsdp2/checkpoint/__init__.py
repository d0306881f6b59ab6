"""Reading, writing and converting checkpoints; knows nothing of Composer."""
