"""Views: values of `tasks.inspection` and `tasks.dry_run`, rendered on a console.

In:  a value.
Out: headings, tables, and text; nothing of the data is interpreted.
"""
