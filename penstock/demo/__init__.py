"""The demo: a small GPT, trained on text that ships with Python."""
