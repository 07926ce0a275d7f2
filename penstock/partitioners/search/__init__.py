"""How good cuts are told from bad ones, and how the best are found."""
