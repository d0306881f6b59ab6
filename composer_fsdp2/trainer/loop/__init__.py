"""Trains, evaluates and predicts as the loop of the Trainer does."""
