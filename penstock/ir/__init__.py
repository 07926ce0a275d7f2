"""The nouns: frozen records that the stations hand to each other, each with its own invariants."""
