"""The command line: one file a verb, thin, everything heavy imported late."""
