"""A folder for PYTHONPATH: Python runs its `sitecustomize.py` at the start of a child process."""
