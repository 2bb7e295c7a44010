"""Choose which conversations share a row, after the rows are planned: by `company`, and in each epoch others.

In: the rows of a plan, and the tokens of its conversations. Out: the same rows with the same lengths in the same
places; conversations of equal length have swapped theirs. Fill, bounds, and the ledger stay as they were.
"""
