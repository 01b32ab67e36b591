"""Reading recordings and traces into typed data. No torch here."""
