"""The timeline of a page: every event of a trace in rows, at every level of detail."""
