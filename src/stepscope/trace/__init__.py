"""Reads recordings and traces into typed data, without torch."""
