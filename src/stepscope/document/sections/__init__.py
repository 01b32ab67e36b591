"""The sections of a report, one a file: each a function from what was looked at to parts."""
