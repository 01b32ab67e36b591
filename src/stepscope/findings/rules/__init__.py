"""One rule a file: `check(case)` gives findings, none, or raises Unavailable. The file's name is the finding's id."""
