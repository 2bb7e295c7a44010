"""Balance: the cost of rows, and an order in which ranks wait the least.

In:  the rows of a plan, with the conversations in each row.
Out: RowStatistics; the order of the rows if `balance` is set; the share of the time in which ranks wait.
"""
