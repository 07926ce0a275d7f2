"""The functions and classes that Python users call; `penstock` exports them."""
