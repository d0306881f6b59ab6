"""Reading weights and checkpoints of other programs; knows files and names, not Composer."""
