"""How one backend is kept full of rows, and each row brought to one outcome.

In order: `window` sends rows, `retry` says which responses end a row and when another try comes.
"""
