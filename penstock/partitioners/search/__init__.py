"""Search algorithms that the partitioners share."""
