"""Balance: what rows cost, an order in which the ranks of a step wait for each other the least, and how long they wait.

In:  the rows of a plan, with the conversations in each.
Out: RowStatistics; for `balance`, the order of the rows; the share of the time that ranks wait.
"""
