"""What Composer's Trainer has to know of tensor parallelism."""
