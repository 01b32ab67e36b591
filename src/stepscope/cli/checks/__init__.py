"""What `stepscope bench --check` can be, one file each."""
