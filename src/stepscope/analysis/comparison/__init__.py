"""Two runs, a sweep, a tuning or a verification side by side, with the statistics that decide."""
