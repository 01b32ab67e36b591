"""The cheap way to record a loop that only trains: notes of its hooks, interpreted later."""
