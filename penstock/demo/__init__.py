"""What the demo trains: a small GPT on text that ships with Python."""
