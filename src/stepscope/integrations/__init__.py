"""Stepscope inside other packages: callbacks of trainers, each in a module of its own."""
