"""Compilations, graph breaks, recompiles and compiled regions."""
