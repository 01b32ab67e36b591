"""The whole run: how its figures change from the first step to the last."""
