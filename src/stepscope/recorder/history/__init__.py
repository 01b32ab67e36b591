"""The whole run: blocks of steps and events, written by a thread of its own."""
