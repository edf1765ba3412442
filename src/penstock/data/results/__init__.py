"""From a response to columns.

In order: `outcome` is how a row ended, `responses` the JSON that engines answer, `columns` what is read from
it, `merge` how these columns lie beside the user's.
"""
