"""The doors for Python users, thin: each calls one room."""
