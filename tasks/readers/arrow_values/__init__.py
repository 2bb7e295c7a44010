"""Convert the columns of tables to values as JSON has them.

In:  an Arrow array, such as list<struct<role, content, tool_calls>>.
Out: a list of Python values, such as [{"role": "user", "content": "2+2?"}], without the nulls that tables add.
"""
