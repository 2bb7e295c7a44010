"""Company: choose which conversations share a row, after the rows are planned.

In:  the rows of a plan, and the tokens of its conversations.
Out: the same rows, in which conversations of equal length have swapped places, as `company` demands and so that
     different conversations share a row in each epoch. Fill, bounds, and the ledger stay the same.
"""
