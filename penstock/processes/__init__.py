"""MECHANISM: a function -> processes joined by torch.distributed, what each of them is doing, and why it stopped."""
